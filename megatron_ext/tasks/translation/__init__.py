"""Families that translate: attention alone, and LSTMs with attention."""
