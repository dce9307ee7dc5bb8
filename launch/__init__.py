"""Starts runs, watches them, judges them and ends them."""
