"""Rotary position embedding: queries and keys turned by angles that follow from their places."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Tuple

import torch
from torch import Tensor

from megatron_ext.contract.models.model import ModelConfig

LOW_FREQUENCY, HIGH_FREQUENCY, TRAINED_WITH = 1.0, 4.0, 8192
"""Of Llama 3's scaled rotary embedding: waves longer than `TRAINED_WITH / LOW_FREQUENCY` tokens are stretched, those
shorter than `TRAINED_WITH / HIGH_FREQUENCY` are not, and between them by part (as in Megatron-LM)."""


@lru_cache(maxsize=8)
def rotary(config: ModelConfig, sequence: int, device: torch.device) -> Tuple[Tensor, Tensor]:
    """Cosines and sines [sequence, head width] by which queries and keys are rotated (Su et al. 2021), fp32."""
    half = torch.arange(0, config.head_width, 2, dtype=torch.float32)
    frequencies = 1.0 / config.rotary_base ** (half / config.head_width)
    if config.rope_scaling_factor is not None:
        waves = 2 * math.pi / frequencies
        kept = (TRAINED_WITH / waves - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)
        kept = kept.clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / config.rope_scaling_factor)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(device), angles.sin().to(device)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, sequence, width], each pair of numbers half a width apart turned by its angle."""
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)
