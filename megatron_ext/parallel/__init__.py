"""Ranks: where they meet, their groups, messages and tensor parallelism."""
