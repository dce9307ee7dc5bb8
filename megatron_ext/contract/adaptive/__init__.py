"""Decides how large the global batch is and how replicas share it, from what is measured while a run trains."""
