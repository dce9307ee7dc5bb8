"""Positions without weights: queries and keys turned by angles that follow from their places, or sines and cosines
added to embeddings (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.parallel.fused import Fused

LOW_FREQUENCY, HIGH_FREQUENCY, TRAINED_WITH = 1.0, 4.0, 8192
"""Llama 3's scaled rotary embedding: waves longer than `TRAINED_WITH / LOW_FREQUENCY` tokens are stretched, those
shorter than `TRAINED_WITH / HIGH_FREQUENCY` are not, and between them by part (as in Megatron-LM)."""


@lru_cache(maxsize=8)
def rotary(config: ModelConfig, sequence: int, device: torch.device, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Cosines and sines [sequence, rotated numbers of a head] by which queries and keys are rotated (Su et al. 2021),
    worked out in fp32. All layers of a model have the same two tensors."""
    width = config.rotated_width
    half = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rotary_base ** (half / width)
    if config.rope_scaling_factor is not None:
        waves = 2 * math.pi / frequencies
        kept = (TRAINED_WITH / waves - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)
        kept = kept.clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / config.rope_scaling_factor)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float32, device="cpu"), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@Fused
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, sequence, head width], of which the first `width` numbers are turned, each pair half a width
    apart by its angle; cosines and sines of at least as many places, [places, width] or [batch, 1, places, width]."""
    cos, sin = cos[..., : x.shape[-2], :], sin[..., : x.shape[-2], :]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return turned if not rest.shape[-1] else torch.cat([turned, rest], -1)


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
