"""Gradients of a rank: one flat buffer, sums over replicas, and the halves that measure noise."""
