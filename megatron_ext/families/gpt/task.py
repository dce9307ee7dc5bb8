"""Decoders that predict the next token: the GPT-2 family, and with other options Llama's."""

from __future__ import annotations

from functools import partial
from typing import Tuple, Type

from megatron_ext.contract.plan import Plan
from megatron_ext.families.gpt.layer import CappedHead, GptEmbedding, GptLayer, PackedEmbedding, PackedLayer
from megatron_ext.families.gpt.options import GptOptions
from megatron_ext.tasks.language.language_task import NextTokenTask
from megatron_ext.tasks.language.transformer import Head
from megatron_ext.tasks.task import SEQUENCE, Block, Placement, Wire


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
