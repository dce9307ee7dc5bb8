"""Encoders that predict masked tokens and, with a binary head, whether two sentences follow each other (Devlin et al.
2019), as Megatron-LM builds them: the norms stand before attention and MLP, and a last one before the heads."""

from __future__ import annotations

from functools import partial
from typing import Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.model import TOKEN_TYPES, ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.masked.bert_samples import BertSamples
from megatron_ext.data.masked.masked_samples import masking_of
from megatron_ext.data.samples import Samples
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.language_task import LanguageTask
from megatron_ext.tasks.language.norms import norm
from megatron_ext.tasks.language.transformer import Embedding, Head, empty_linear
from megatron_ext.tasks.linear import linear
from megatron_ext.tasks.task import SEQUENCE, Block, Micro, Placement, Tensors, Wire

MASKED = 0.15
"""The part of an example's tokens that the loss asks for."""


class BertTask(LanguageTask):
    """Predicts masked tokens, and whether the second of two sentences is a random one."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        model = plan.model
        types = ("types",) if model.bert_binary_head else ()
        self.inputs = ("text", "number", *types, "padding_mask")
        self.outputs = ("logits", "binary_logits") if model.bert_binary_head else ("logits",)
        layers, wires = self.layers(model.stacks()[0], "hidden", SEQUENCE, ("number", "padding_mask"))
        first, last = wires[0].name, wires[-1].name
        embedding = partial(Embedding, model, seed=self._seed)
        self.blocks = [
            Block("embedding", "embedding", ("text", "number", *types), (first,), embedding, Placement.FIRST),
            *layers,
            Block("head", "head", (last,), self.outputs, partial(BertHead, model), Placement.LAST),
        ]
        logits = Wire("logits", ("batch", model.sequence_length, model.padded_vocab_size))
        binary = Wire("binary_logits", ("batch", 2))
        self.wires = {wire.name: wire for wire in (*wires, logits, binary)}

    def samples(self, split: str, count: int) -> Samples:
        model = self._model
        make = partial(
            BertSamples,
            sequence_length=model.sequence_length,
            vocab_size=model.vocab_size,
            masking=masking_of(self._plan),
            pairs=model.bert_binary_head,
        )
        return samples_of_plan(self._plan, split, count, make)

    def micro(self, sample: Tensors) -> Micro:
        """[micro-batch size, sequence] each: `text`, `types`, `padding_mask` (0 where no token stands), `labels` and
        `loss_mask` (1 where a token is asked for); [micro-batch size]: `is_random`, and the samples' `number`."""
        targets = {name: sample[name] for name in ("labels", "loss_mask", "is_random")}
        return Micro({name: sample[name] for name in self.inputs}, targets)

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        model = self._model
        shape = (micro_batch_size, model.sequence_length)
        return self.micro(
            {
                "text": torch.randint(model.vocab_size, shape, generator=source),
                "types": torch.randint(TOKEN_TYPES, shape, generator=source),
                "labels": torch.randint(model.vocab_size, shape, generator=source),
                "is_random": torch.randint(2, shape[:1], generator=source),
                "loss_mask": (torch.rand(shape, generator=source) < MASKED).long(),
                "padding_mask": torch.ones(shape, dtype=torch.int64),
                "number": torch.arange(micro_batch_size),
            }
        )

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The mean over the tokens that are asked for and, with a binary head, that over the samples."""
        labels, mask = micro.targets["labels"], micro.targets["loss_mask"]
        loss = vocab_cross_entropy(left["logits"], labels, self._model.vocab_size, tensor, mask)
        if "binary_logits" not in left:
            return loss
        return loss + F.cross_entropy(left["binary_logits"].float(), micro.targets["is_random"].long())


class BertHead(Head):
    """Final norm; a dense layer, GELU and a norm before the logits; and of the first token, two classes."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        self.dense = empty_linear(config.hidden, config.hidden, True)
        self.dense_norm = norm(config)
        self.pooler: Optional[nn.Linear] = None
        if config.bert_binary_head:
            self.pooler = empty_linear(config.hidden, config.hidden, True)
            self.binary = empty_linear(config.hidden, 2, True)

    def forward(self, x: Tensor) -> Union[Tensor, Tuple[Tensor, ...]]:
        """[batch, sequence, hidden] -> logits [batch, sequence, padded vocabulary / tensor size] and of the pair of
        sentences [batch, 2]."""
        x = self.norm(x)
        dense = linear(x, self.dense.weight, self.dense.bias, self.later)
        logits = self.logits(self.dense_norm(F.gelu(dense)))
        if self.pooler is None:
            return logits
        first = self.tensor.first_token(x)
        pooled = torch.tanh(linear(first, self.pooler.weight, self.pooler.bias, self.later))
        return logits, self.tensor.alike(linear(pooled, self.binary.weight, self.binary.bias, self.later))


TASK = BertTask
