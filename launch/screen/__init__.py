"""Terminals: tables, views that are drawn anew, questions."""
