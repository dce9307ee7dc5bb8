"""The AWD-LSTM language model (Merity et al. 2018): LSTMs that predict the next token, regularized at every place.

Every sample begins with a state of zeros. Its tokens are all that its loss depends on, so that any replica can take it,
in any order.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.dropped_lstm import DroppedEmbedding, DroppedLayer
from megatron_ext.tasks.language.logits import Logits
from megatron_ext.tasks.language.next_token import NextTokenTask
from megatron_ext.tasks.task import SEQUENCE, Block, Placement, Wire

RANGE = 0.1
"""Of the initial embedding, on both sides of 0."""
GATES = 4
"""Of an LSTM: so many times as many rows as it is wide have its weights."""


class AwdLmTask(NextTokenTask):
    """Unless untied, the head's matrix is the word embedding, and the last layer is as wide as a word's vector."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        again = plan.recompute == "full"
        names = [f"hidden.{number}" for number in range(model.layers + 1)]
        widths = [model.word_width, *[model.hidden] * (model.layers - 1), model.head_inputs]
        kinds = [stack.kind for stack in model.stacks() for _ in range(stack.layers)]
        embedding = partial(DroppedEmbedding, model, seed=self._seed)
        self.blocks = [
            Block("embedding", "embedding", ("tokens", "number"), (names[0],), embedding, Placement.FIRST),
            *(
                Block(
                    *(f"layers.{number}", kind, (names[number], "number"), (names[number + 1],)),
                    partial(DroppedLayer, model, kind, name=f"layers.{number}", seed=self._seed, again=again),
                )
                for number, kind in enumerate(kinds)
            ),
            Block("head", "head", (names[-1],), self.outputs, partial(Logits, model), Placement.LAST),
        ]
        wires = [Wire(name, ("batch", SEQUENCE, width)) for name, width in zip(names, widths)]
        logits = Wire("logits", ("batch", SEQUENCE, model.padded_vocab_size))
        self.wires = {wire.name: wire for wire in (*wires, logits)}

    def initialise(self, name: str, parameter: Tensor, tensor: TensorGroup) -> None:
        """Embedding and head uniform, as `RANGE` says; an LSTM's weights and biases up to 1/sqrt(its width), as
        torch's; the head's bias 0."""
        if parameter.is_meta:
            return
        if name == "head.bias":
            parameter.zero_()
            return
        limit = 1 / math.sqrt(len(parameter) // GATES) if ".lstm." in name else RANGE
        rows = self.rows(name) or len(parameter)
        whole = torch.empty([rows, *parameter.shape[1:]]).uniform_(-limit, limit, generator=self._source(name))
        parameter.zero_()
        parameter[:rows] = whole
