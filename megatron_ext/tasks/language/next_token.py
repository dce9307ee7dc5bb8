"""What the families that predict the next token of running text have in common: samples, loss, perplexity."""

from __future__ import annotations

from functools import partial
from typing import Mapping, Optional

import torch
from torch import Tensor

from megatron_ext.data.blend import samples_of_plan
from megatron_ext.data.gpt_samples import GptSamples, samples_in_epoch
from megatron_ext.data.samples import Samples
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.language_task import LanguageTask, perplexity
from megatron_ext.tasks.task import Micro, Tensors


class NextTokenTask(LanguageTask):
    """A family that takes `tokens` and the samples' `number`, and gives `logits`."""

    inputs = ("tokens", "number")
    outputs = ("logits",)

    def samples(self, split: str, count: int) -> Samples:
        make = partial(GptSamples, sequence_length=self._model.sequence_length, vocab_size=self._model.vocab_size)
        return samples_of_plan(self._plan, split, count, make)

    def micro(self, sample: Tensors) -> Micro:
        """`tokens` [micro-batch size, sequence + 1]: inputs and, shifted, labels; and the samples' `number`."""
        tokens = sample["tokens"]
        return Micro({"tokens": tokens[:, :-1], "number": sample["number"]}, {"labels": tokens[:, 1:]})

    def example(self, micro_batch_size: int, source: torch.Generator) -> Micro:
        shape = (micro_batch_size, self._model.sequence_length + 1)
        tokens = torch.randint(self._model.vocab_size, shape, generator=source)
        return self.micro({"tokens": tokens, "number": torch.arange(micro_batch_size)})

    def loss(self, left: Tensors, micro: Micro, tensor: TensorGroup) -> Tensor:
        """The mean over the tokens; every micro-batch has as many."""
        return vocab_cross_entropy(left["logits"], micro.targets["labels"], self._model.vocab_size, tensor)

    def epoch(self, split: str) -> Optional[int]:
        plan = self._plan
        if plan.data_blend:
            return None
        return samples_in_epoch(plan.data_prefix, plan.data_split, split, self._model.sequence_length)

    def evaluated(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return {**means, "perplexity": perplexity(means["loss"])}
