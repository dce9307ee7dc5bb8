"""The options that only a GPT has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megatron_ext.contract.keys import Range, option, positive


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
    sliding_rotary_base: Optional[float] = option(None, positive(1e12))
    """With sliding_window and rope: rotary_base of the layers that have a window, as in Gemma 3; null: the same."""
    attention_softcap: Optional[float] = option(None, positive(1e6))
    """For gpt with engine=tdpp: soft cap c of attention's scores s, which become c tanh(s / c), as in Gemma 2."""
    logits_softcap: Optional[float] = option(None, positive(1e6))
    """For gpt with engine=tdpp: the same of the logits."""
    query_scalar: Optional[int] = option(None, Range(1, 2**16))
    """For gpt with engine=tdpp: attention's scores are divided by the root of it; null: of the width of a head."""
    post_norms: bool = False
    """For gpt with engine=tdpp: normalize what attention and MLP give, too, before it is added, as Gemma does."""
    scale_embedding: bool = False
    """For gpt with engine=tdpp: multiply the words' vectors by the root of hidden, as Gemma does."""
    geglu: bool = False
    """For gpt with engine=tdpp: with swiglu, the MLP's gate is GELU instead of SiLU."""


def slides(options: GptOptions, layer: int) -> bool:
    """Whether a layer, counted from 0, has a sliding window."""
    every = options.full_attention_every
    return options.sliding_window is not None and (every is None or (layer + 1) % every != 0)


def window_of(options: GptOptions, layer: int, sequence_length: int) -> Optional[int]:
    """The sliding window of a layer, counted from 0; None where it is as long as the sequence, or longer."""
    window = options.sliding_window
    return window if window is not None and window < sequence_length and slides(options, layer) else None


OPTIONS = GptOptions
