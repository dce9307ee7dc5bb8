"""The options that only a GPT has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megatron_ext.contract.keys import Range, option


@dataclass(frozen=True)
class GptOptions:
    experts: Optional[int] = option(None, Range(2, 2**12))
    """For gpt with engine=megatron_core: MLPs of each layer, of which a router chooses some for each token; null: one
    MLP, and no router."""
    experts_per_token: int = option(2, Range(1, 2**8))
    """With experts: how many of them work on a token."""


OPTIONS = GptOptions
