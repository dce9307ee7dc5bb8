"""Small data of pairs: a sentence and the same said backwards, and the loss of a global batch in torch's words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_ext.contract.plan import Plan
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.pairs import PairSamples, side_prefix
from megatron_ext.data.samples import SPLITS, Split

FIRST_WORD = 4
"""Behind the marks."""


def write_pairs(folder: Path, vocab_size: int, pairs: int = 40, longest: int = 20, seed: int = 0) -> Path:
    """The prefix of `pairs` for training, and a few for the other splits."""
    prefix = folder / "pairs"
    random = np.random.default_rng(seed)
    for split in SPLITS:
        count = pairs if split == "train" else 8
        source = [random.integers(FIRST_WORD, vocab_size, random.integers(1, longest + 1)) for _ in range(count)]
        write_indexed(side_prefix(prefix, split, "source"), source, np.dtype("<u2"))
        write_indexed(side_prefix(prefix, split, "target"), [one[::-1] for one in source], np.dtype("<u2"))
    return prefix


class PairLoss:
    """The mean over the target tokens of a global batch."""

    def __init__(self, plan: Plan) -> None:
        model = plan.model
        split = Split(plan.train.iterations * plan.global_batch_size, plan.train.seed)
        self._samples = PairSamples(
            plan.data_prefix, split, model.sequence_length, model.decoder_tokens, model.vocab_size
        )
        self._model = model

    def __call__(self, model: torch.nn.Module, number: Tensor) -> Tensor:
        batch = {name: torch.from_numpy(content) for name, content in self._samples.batch(number.numpy()).items()}
        logits = model(batch)["logits"][..., : self._model.vocab_size]
        asked = batch["loss_mask"].bool()
        return F.cross_entropy(logits[asked], batch["labels"][asked], label_smoothing=self._model.label_smoothing)
