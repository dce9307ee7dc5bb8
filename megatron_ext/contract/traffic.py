"""What ranks send each other while they train, by what it is for."""

from __future__ import annotations

ACTIVATIONS = "activations"
"""To the stage after."""
GRADIENTS = "gradients"
"""Those of activations, to the stage before."""
ALL_REDUCE = "all_reduce"
"""Gradients of weights, summed over replicas and over ranks that share a parameter."""
WEIGHTS = "weights"
"""Weights that a sharded optimizer hands out."""
TENSOR = "tensor"
"""Within tensor groups, in the passes."""
KINDS = (ACTIVATIONS, GRADIENTS, ALL_REDUCE, WEIGHTS, TENSOR)
