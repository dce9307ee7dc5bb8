"""The AWD-LSTM language model (Merity et al. 2018): LSTMs that predict the next token, regularized at every place.

Every sample begins with a state of zeros. Its tokens are all that its loss depends on, so that any replica can take it,
in any order.
"""

from __future__ import annotations

import math
from functools import partial
from typing import List, Optional

import torch
from torch import Tensor, nn

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.families.awd_lm import FAMILY
from megatron_ext.families.awd_lm.options import AwdLmOptions
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.dropout import dropout, key_of, rows_of
from megatron_ext.tasks.language.language_task import NextTokenTask
from megatron_ext.tasks.language.transformer import Logits
from megatron_ext.tasks.linear import WeightGradients, embedding
from megatron_ext.tasks.repeatable import passed
from megatron_ext.tasks.task import SEQUENCE, Block, Placement, Wire

RANGE = 0.1
"""The range of the initial embedding, on both sides of 0."""
GATES = 4
"""Gates of an LSTM: its weights have so many times as many rows as it is wide."""


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
        if name == "head.bias":
            parameter.zero_()
        elif not parameter.is_meta:
            limit = 1 / math.sqrt(len(parameter) // GATES) if ".lstm." in name else RANGE
            self._draw(name, parameter, limit, tensor)


class LockedDropout:
    """Drops the same numbers of a sample's vectors at every place of the sequence (Gal and Ghahramani 2016)."""

    def __init__(self, rate: float, key: Tensor) -> None:
        self.rate = rate
        self.key = key

    def __call__(self, x: Tensor, number: Tensor, training: bool) -> Tensor:
        """[batch, sequence, width] -> the same; `number` [batch] are the samples' numbers in the run."""
        if not self.rate or not training:
            return x
        return dropout(x, self.rate, rows_of(self.key, number).unsqueeze(1))


class DroppedEmbedding(nn.Module):
    """Vectors of words, of which training drops some words of each sample, wherever they stand, and some numbers."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, seed: int) -> None:
        super().__init__()
        self.later: Optional[WeightGradients] = None
        own = config.own(AwdLmOptions)
        self.word_rate = own.embedding_dropout
        self.word_key = key_of(seed, "embedding.word")
        self.dropout = LockedDropout(own.input_dropout, key_of(seed, "embedding"))
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size, config.word_width))

    def forward(self, tokens: Tensor, number: Tensor) -> Tensor:
        """tokens [batch, sequence], number [batch] -> [batch, sequence, width]."""
        x = embedding(tokens, self.word, self.later)
        if self.training and self.word_rate:
            words = rows_of(self.word_key, number, tokens)
            x = x * dropout(x.new_ones(*tokens.shape, 1), self.word_rate, words)
        return self.dropout(x, number, self.training)


class DroppedLayer(nn.Module):
    """An LSTM, of whose weights between steps training drops a part (Wan et al. 2013), and of its result another."""

    def __init__(self, config: ModelConfig, kind: str, tensor: TensorGroup, name: str, seed: int, again: bool) -> None:
        super().__init__()
        self.again = again
        own = config.own(AwdLmOptions)
        rate = own.output_dropout if kind == "layer_last" else config.hidden_dropout
        self.dropout = LockedDropout(rate, key_of(seed, name))
        self.lstm = WeightDroppedLstm(*FAMILY.widths(config, kind), own.weight_dropout, key_of(seed, f"{name}.lstm"))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[batch, sequence, inputs], number [batch] -> [batch, sequence, outputs]."""
        return passed(self._forward, self.again, x, number)

    def _forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.dropout(self.lstm(x, number), number, self.training)


class WeightDroppedLstm(nn.Module):
    """One layer of torch's LSTM, under its names."""

    def __init__(self, inputs: int, outputs: int, rate: float, key: Tensor) -> None:
        super().__init__()
        self.rate = rate
        self.key = key
        gates = 4 * outputs
        self.weight_ih_l0 = nn.Parameter(torch.empty(gates, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(gates, outputs))
        self.bias_ih_l0 = nn.Parameter(torch.empty(gates))
        self.bias_hh_l0 = nn.Parameter(torch.empty(gates))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[batch, sequence, inputs], number [batch] -> [batch, sequence, outputs]."""
        between: Tensor = self.weight_hh_l0
        if self.training and self.rate:
            gates = torch.arange(len(between), device=x.device)
            between = dropout(between, self.rate, rows_of(self.key, number[:1], gates)[0])
        begin = x.new_zeros(1, len(x), between.shape[1])
        weights: List[Tensor] = [self.weight_ih_l0, between, self.bias_ih_l0, self.bias_hh_l0]
        return torch.lstm(x, (begin, begin), weights, True, 1, 0.0, self.training, False, True)[0]


TASK = AwdLmTask
