"""The layers of megatron.core's model: Transformer Engine's where it is there, else megatron.core's own.

Of the latter, norms take no sequence parallelism, and the attention holds all scores; tdpp's stand in their place.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.errors import EngineError
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
    """The core of causal attention, by torch's kernel for it; of a sequence that ranks share, with the keys and values
    of all of them."""

    def __init__(self, config: Any, *_: object, softmax_scale: Optional[float] = None, **__: object) -> None:
        super().__init__()
        self._dropout = config.attention_dropout
        self._scale = softmax_scale
        self._shared = config.context_parallel_size > 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """query [tokens, batch, heads, width], key and value with as many heads or fewer -> [tokens, batch, heads x
        width]."""
        from megatron.core.parallel_state import get_context_parallel_group
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        mask = None
        if self._shared:
            group = get_context_parallel_group()
            mask = seen(len(query), group, query.device)
            key, value = gathered(key, group), gathered(value, group)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if (self._dropout and self.training) or self._scale is not None or mask is not None:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            rate = self._dropout if self.training else 0.0
            with get_cuda_rng_tracker().fork() if rate else nullcontext():  # each tensor rank drops other weights
                y = F.scaled_dot_product_attention(query, key, value, mask, rate, mask is None, scale=self._scale)
            return y.permute(2, 0, 1, 3).flatten(2)
        return attend(query, key, value, True, None, None).transpose(0, 1).flatten(2)


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
    norm = _RmsNorm if config.normalization == RMS_NORM else _LayerNorm
    one = gpt_layer_specs.get_gpt_layer_local_spec(**options)
    one.submodules.input_layernorm = one.submodules.pre_mlp_layernorm = norm
    if not config.multi_latent_attention:
        one.submodules.self_attention.submodules.core_attention = _Attention
    elif config.context_parallel_size > 1:
        raise EngineError(
            f"context={config.context_parallel_size} with engine.options.multi_latent_attention=true needs Transformer "
            "Engine, which is not there; use parallel.context=1, or a machine or a container that has it"
        )
    return TransformerBlockSubmodules(layer_specs=[one] * count, layer_norm=norm)
