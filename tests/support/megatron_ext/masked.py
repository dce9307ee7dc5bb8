"""Samples for BERT and T5 that follow from their numbers alone: of several lengths, padded, some labels without a
token. And their losses in torch's words."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples
from megatron_ext.tasks.language.language_task import LanguageTask

LABELS = {"labels", "loss_mask", "is_random"}


class MaskedSamples(Samples):
    """Of either family, named as Megatron's datasets name what they hold."""

    def __init__(self, model: ModelConfig, samples: int) -> None:
        super().__init__(samples)
        self.order = {"seed": 1.0}
        self._model = model

    def sample(self, number: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(number)
        model = self._model
        text, mask = self._padded(random, model.sequence_length)
        if model.family == "bert":
            asked = mask * (random.random(len(mask)) < 0.3)
            asked[0] = 0
            asked[1] = 1
            return {
                "text": text,
                "types": (np.arange(len(text)) >= random.integers(1, len(text))).astype(np.int64) * mask,
                "labels": np.where(asked, random.integers(model.vocab_size, size=len(text)), -1),
                "is_random": random.integers(2, size=()),
                "loss_mask": asked.astype(np.int64),
                "padding_mask": mask,
            }
        answer, answered = self._padded(random, model.decoder_tokens)
        labels = np.where(answered, random.integers(model.vocab_size, size=len(answer)), -1)
        return {
            "text_enc": text,
            "text_dec": answer,
            "labels": labels,
            "loss_mask": answered,
            "enc_mask": mask,
            "dec_mask": answered,
        }

    def _padded(self, random: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        mask = (np.arange(length) < random.integers(3, length + 1)).astype(np.int64)
        return random.integers(1, self._model.vocab_size, size=length) * mask, mask


def masked_samples(task: LanguageTask, split: str, count: int) -> Samples:
    """In the place of a task's own."""
    return MaskedSamples(task._model, count)


class MaskedLoss:
    """The loss of a global batch: the mean of its micro-batches', each a mean over what is asked for."""

    def __init__(self, plan: Plan, micro_batch_size: int) -> None:
        self._samples = MaskedSamples(plan.model, plan.train.iterations * plan.global_batch_size)
        self._vocab = plan.model.vocab_size
        self._size = micro_batch_size

    def batches(self, number: Tensor) -> list[dict[str, Tensor]]:
        """The micro-batches of these samples."""
        return [
            {name: torch.from_numpy(content) for name, content in self._samples.batch(part.numpy()).items()}
            for part in number.split(self._size)
        ]

    def __call__(self, model: torch.nn.Module, number: Tensor) -> Tensor:
        losses = []
        for batch in self.batches(number):
            left = model({name: content for name, content in batch.items() if name not in LABELS})
            asked = batch["loss_mask"].bool()
            loss = F.cross_entropy(left["logits"][asked][:, : self._vocab], batch["labels"][asked])
            if "binary_logits" in left:
                loss = loss + F.cross_entropy(left["binary_logits"], batch["is_random"])
            losses.append(loss)
        return torch.stack(losses).mean()
