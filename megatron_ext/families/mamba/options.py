"""The options that only a Mamba has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megatron_ext.contract.keys import Range, option


@dataclass(frozen=True)
class MambaOptions:
    mamba_state_dim: int = option(16, Range(1, 2**12))
    """For mamba: numbers in the state of each channel."""
    mamba_expand: int = option(2, Range(1, 2**6))
    """For mamba: a layer has this many times hidden channels."""
    mamba_conv_kernel: int = option(4, Range(1, 2**8))
    """For mamba: tokens that a channel's convolution sees, up to its own."""
    mamba_time_step_rank: Optional[int] = option(None, Range(1, 2**16))
    """For mamba: numbers from which a token's time steps are computed; null: a sixteenth of hidden, rounded up."""


OPTIONS = MambaOptions
