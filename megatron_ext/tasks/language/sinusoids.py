"""Positions as sines and cosines, which need no weights (Vaswani et al. 2017)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def sinusoids(sequence: int, width: int, device: torch.device) -> Tensor:
    """[sequence, width] in fp32: sines, then cosines, of places times frequencies from 1 down to 1/10000.

    The order is that of Tensor2Tensor and OpenSeq2Seq; the paper alternates the two.
    """
    return _table(1 << max(0, sequence - 1).bit_length(), width, device)[:sequence]


@lru_cache(maxsize=8)
def _table(sequence: int, width: int, device: torch.device) -> Tensor:
    """For a power of two, so that sequences of many lengths share few."""
    half = width // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / max(half - 1, 1))
    angles = torch.outer(torch.arange(sequence, dtype=torch.float32), frequencies)
    return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2)).to(device)
