"""The ranks of one node: their processes, and why one ended."""
