"""Megatron's order of ranks: tensor fastest, then data, then pipeline."""

from __future__ import annotations

from typing import Tuple


def stage_dp_tp(rank: int, tensor: int, data: int) -> Tuple[int, int, int]:
    """Stage, replica and place in the tensor group of a rank: rank = (stage * data + dp) * tensor + tp."""
    return rank // (tensor * data), rank // tensor % data, rank % tensor
