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
    add_qkv_bias: bool = False
    """For gpt with engine=tdpp: queries, keys and values have biases even with add_bias_linear=false, as in Qwen 2."""
    qk_layernorm: bool = False
    """For gpt with engine=tdpp: normalize the queries and keys of each head, as Qwen 3 does."""
    sliding_window: Optional[int] = option(None, Range(1, 2**24))
    """For gpt with engine=tdpp: a token attends to so many at most, itself among them; null: to all before it."""
    full_attention_every: Optional[int] = option(None, Range(1, 10_000))
    """With sliding_window: each layer of so many attends to all tokens, the last of them; null: none does."""


def window_of(options: GptOptions, layer: int, sequence_length: int) -> Optional[int]:
    """The sliding window of a layer, counted from 0; None where it is as long as the sequence, or longer."""
    every, window = options.full_attention_every, options.sliding_window
    if window is None or window >= sequence_length or (every is not None and (layer + 1) % every == 0):
        return None
    return window


OPTIONS = GptOptions
