"""The layers of megatron.core's models: GPT's of Transformer Engine where it is there, else megatron.core's own.

Of the latter, norms take no sequence parallelism, and the attention holds all scores; tdpp's stand in their place.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.keys import RMS_NORM
from megatron_ext.core.context import gathered, seen
from megatron_ext.core.library import Library
from megatron_ext.tasks.language.attention import attend
from megatron_ext.tasks.language.norms import RMSNorm


class _LayerNorm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps)
        _share(self, config)


class _RmsNorm(RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps)
        _share(self, config)


def _share(module: nn.Module, config: Any) -> None:
    """Has gradients summed over the tensor group where each of its ranks has a share of the sequence."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Attention(nn.Module):
    """The core of attention, by torch's kernel for it; of a sequence that ranks share, with the keys and values of all
    of them."""

    def __init__(
        self, config: Any, *_: object, attn_mask_type: Any, softmax_scale: Optional[float] = None, **__: object
    ) -> None:
        super().__init__()
        self._dropout = config.attention_dropout
        self._scale = softmax_scale
        self._causal = attn_mask_type.name == "causal"
        self._shared = config.context_parallel_size > 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], *_: object, **__: object
    ) -> Tensor:
        """query [tokens, batch, heads, width], key and value with as many heads or fewer -> [tokens, batch, heads x
        width]. Unless it is causal, `mask` [batch, 1, tokens or 1, tokens] is true where one is not seen; its first row
        tells which tokens are there, for a sequence begins with one that is."""
        from megatron.core.parallel_state import get_context_parallel_group
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        there = None if mask is None or self._causal else ~mask[:, 0, 0]
        visible = None if there is None else there[:, None, None]
        if self._shared:
            group = get_context_parallel_group()
            visible = seen(len(query), group.size(), group.rank(), query.device)
            widths = key.shape[-1], value.shape[-1]
            key, value = gathered(torch.cat([key, value], -1), group).split(widths, -1)  # type: ignore[no-untyped-call]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if (self._dropout and self.training) or self._scale is not None or self._shared:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            rate, causal = self._dropout if self.training else 0.0, self._causal and not self._shared
            with get_cuda_rng_tracker().fork() if rate else nullcontext():  # each tensor rank drops other weights
                y = F.scaled_dot_product_attention(query, key, value, visible, rate, causal, scale=self._scale)
            return y.permute(2, 0, 1, 3).flatten(2)
        return attend(query, key, value, self._causal, there, None).transpose(0, 1).flatten(2)


def layers(library: Library, config: Any, count: int) -> Any:
    """What a stage of `count` layers is made of, as GPTModel takes it."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if library.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        one = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
        return TransformerBlockSubmodules(layer_specs=[one] * count, layer_norm=TENorm)
    one = gpt_layer_specs.get_gpt_layer_local_spec(**options)
    return stack(config, one, count)


def norm_of(config: Any) -> type:
    """The norm of a model, which takes sequence parallelism."""
    return _RmsNorm if config.normalization == RMS_NORM else _LayerNorm


def stack(config: Any, layer: Any, count: int) -> Any:
    """So many of megatron.core's own layers, with tdpp's norms and torch's attention."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm, parts = norm_of(config), layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attentions = [parts.self_attention]
    if isinstance(parts.cross_attention, type(parts.self_attention)):
        parts.pre_cross_attn_layernorm = norm
        attentions.append(parts.cross_attention)
    for attention in attentions:
        attention.submodules.core_attention = _Attention
    if config.multi_latent_attention and config.qk_layernorm:
        attentions[0].submodules.q_layernorm = attentions[0].submodules.kv_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)
