"""Checkpoints that any layout can read, and other formats of weights."""
