"""A layer of a GPT with the options that only this family has: those of Qwen 2 and 3, and sliding windows."""

from __future__ import annotations

from typing import Optional, Tuple

from torch import Tensor

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Stack
from megatron_ext.families.gpt.options import GptOptions, window_of
from megatron_ext.parallel.tensor_parallel import TensorGroup, reduce
from megatron_ext.tasks.language.norms import norm
from megatron_ext.tasks.language.transformer import Embedding, TransformerLayer, empty_linear


class GptLayer(TransformerLayer):
    """Pre-norm attention and MLP."""

    def __init__(
        self, config: ModelConfig, tensor: TensorGroup, stack: Stack, recompute: str, name: str, seed: int
    ) -> None:
        super().__init__(config, tensor, stack, recompute, name, seed)
        own = config.own(GptOptions)
        self.window = window_of(own, int(name.rpartition(".")[2]), config.sequence_length)
        if own.add_qkv_bias and not config.attention_bias:
            self.qkv = empty_linear(config.hidden, self.qkv.out_features, True)
        self.normalizes = own.qk_layernorm
        if self.normalizes:
            self.query_norm, self.key_norm = norm(config, config.head_width), norm(config, config.head_width)
            if tensor.size > 1 and not tensor.sequence_parallel:  # which sums these gradients anyway
                for part in (self.query_norm, self.key_norm):
                    for parameter in part.parameters():
                        parameter.register_hook(lambda gradient: reduce(gradient, tensor))  # type: ignore[no-untyped-call]

    def normalized(self, query: Tensor, key: Tensor) -> Tuple[Tensor, Tensor]:
        return (self.query_norm(query), self.key_norm(key)) if self.normalizes else (query, key)


class PackedEmbedding(Embedding):
    """The embedding of documents that share a sequence."""

    def forward(self, tokens: Tensor, number: Optional[Tensor] = None, positions: Optional[Tensor] = None) -> Tensor:
        return self.embedded(tokens, number, positions=positions)


class PackedLayer(GptLayer):
    """In which documents that share a sequence do not see each other."""

    def forward(  # type: ignore[override]
        self, x: Tensor, number: Optional[Tensor] = None, positions: Optional[Tensor] = None
    ) -> Tensor:
        return self.passed(x, number, positions=positions)
