"""Decoders that predict the next token: the GPT-2 family, and with other options Llama's."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Optional, Tuple, Type

from torch import Tensor

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Stack
from megatron_ext.contract.plan import Plan
from megatron_ext.families.gpt.options import GptOptions, slides, window_of
from megatron_ext.parallel.fused import Fused
from megatron_ext.parallel.tensor_parallel import TensorGroup, reduce
from megatron_ext.tasks.language.attention import softly_capped
from megatron_ext.tasks.language.language_task import NextTokenTask
from megatron_ext.tasks.language.norms import norm
from megatron_ext.tasks.language.transformer import Embedding, Head, TransformerLayer, empty_linear, gelu_gated
from megatron_ext.tasks.task import SEQUENCE, Block, Placement, Wire


class GptLayer(TransformerLayer):
    """Pre-norm attention and MLP."""

    def __init__(
        self, config: ModelConfig, tensor: TensorGroup, stack: Stack, recompute: str, name: str, seed: int
    ) -> None:
        super().__init__(config, tensor, stack, recompute, name, seed)
        own = config.own(GptOptions)
        number = int(name.rpartition(".")[2])
        self.window = window_of(own, number, config.sequence_length)
        if own.add_qkv_bias and not config.attention_bias:
            self.qkv = empty_linear(config.hidden, self.qkv.out_features, True)
        self.softcap = own.attention_softcap
        self.factor = math.sqrt(config.head_width / own.query_scalar) if own.query_scalar is not None else 1.0
        if own.geglu:
            self.gate = gelu_gated
        if own.sliding_rotary_base is not None and slides(own, number):
            self.turned = replace(config, rotary_base=own.sliding_rotary_base)
        self.post_norms = own.post_norms
        if self.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(config), norm(config)
        self.normalizes = own.qk_layernorm
        if self.normalizes:
            self.query_norm, self.key_norm = norm(config, config.head_width), norm(config, config.head_width)
            if tensor.size > 1 and not tensor.sequence_parallel:  # which sums these gradients anyway
                for part in (self.query_norm, self.key_norm):
                    for parameter in part.parameters():
                        parameter.register_hook(lambda gradient: reduce(gradient, tensor))  # type: ignore[no-untyped-call]

    def normalized(self, query: Tensor, key: Tensor) -> Tuple[Tensor, Tensor]:
        if self.normalizes:
            query, key = self.query_norm(query), self.key_norm(key)
        return (query if self.factor == 1.0 else query * self.factor), key

    def given(self, y: Tensor, part: str) -> Tensor:
        if not self.post_norms:
            return y
        return (self.attention_post_norm if part == "attention" else self.mlp_post_norm)(y)


class GptEmbedding(Embedding):
    """The embedding, whose vectors may be scaled."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, seed: int) -> None:
        super().__init__(config, tensor, seed)
        if config.own(GptOptions).scale_embedding:
            self.factor = math.sqrt(config.hidden)


class CappedHead(Head):
    """The head, whose logits have a soft cap."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        self.softcap = config.own(GptOptions).logits_softcap

    def logits(self, x: Tensor) -> Tensor:
        return _capped(super().logits(x), self.softcap)


class PackedEmbedding(GptEmbedding):
    """The embedding of documents that share a sequence."""

    def forward(self, tokens: Tensor, number: Optional[Tensor] = None, positions: Optional[Tensor] = None) -> Tensor:
        return self.embedded(tokens, number, positions=positions)


class PackedLayer(GptLayer):
    """In which documents that share a sequence do not see each other."""

    def forward(  # type: ignore[override]
        self, x: Tensor, number: Optional[Tensor] = None, positions: Optional[Tensor] = None
    ) -> Tensor:
        return self.passed(x, number, positions=positions)


@Fused
def _capped(logits: Tensor, cap: float) -> Tensor:
    return softly_capped(logits, cap)


class GptTask(NextTokenTask):
    """Predicts the next token. Unless untied, the head's matrix is the word embedding."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        taken: Tuple[str, ...] = ("number",) if model.hidden_dropout or model.attention_dropout else ()
        kinds: Tuple[Type[GptEmbedding], Type[GptLayer]] = (GptEmbedding, GptLayer)
        if self.packs:
            taken, kinds = ("number", "positions"), (PackedEmbedding, PackedLayer)
        layers, wires = self.layers(model.stacks()[0], "hidden", SEQUENCE, taken, kinds[1])
        first, last = wires[0].name, wires[-1].name
        head = Head if model.own(GptOptions).logits_softcap is None else CappedHead
        embedding = partial(kinds[0], model, seed=self._seed)
        self.blocks = [
            Block("embedding", "embedding", ("tokens", *taken), (first,), embedding, Placement.FIRST),
            *layers,
            Block("head", "head", (last,), self.outputs, partial(head, model), Placement.LAST),
        ]
        logits = Wire("logits", ("batch", model.sequence_length, model.padded_vocab_size))
        self.wires = {wire.name: wire for wire in (*wires, logits)}


TASK = GptTask
