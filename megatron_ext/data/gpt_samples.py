"""The training samples of a GPT model, in Megatron's order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Dict, NamedTuple, Optional, Sequence, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.data.index_maps import build_or_load, layout, sample_tokens, split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")
NUMBERS_OF_A_SPLIT = 1 << 40
"""Samples are numbered over all splits: those of the n-th from n times this on."""


class Position(NamedTuple):
    """How far a run was in its data when it was started or resumed."""

    iteration: int = 0
    samples: int = 0
    """Consumed up to the end of that iteration, whatever the global batch sizes were."""

    def consumed(self, iteration: int, global_batch_size: int) -> int:
        """Samples consumed up to the end of an `iteration` that is not before this one."""
        return self.samples + (iteration - self.iteration) * global_batch_size


BEGINNING = Position()


class Samples:
    """Samples by number, and what each replica takes of them; the iterations after `start` go on with its samples."""

    order: Dict[str, float]
    """What the order of the samples follows from: if equal, two runs have the same samples in the same order."""

    def __init__(self, name: str, samples: int, sequence_length: int, start: Position) -> None:
        self._first_number = SPLITS.index(name) * NUMBERS_OF_A_SPLIT
        self._samples = samples
        self._sequence_length = sequence_length
        self._start = start

    def __len__(self) -> int:
        return self._samples

    def tokens(self, sample: int) -> NDArray[np.int64]:
        """[sequence_length + 1]: the token ids of one sample; the last is only predicted, the first only read.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        raise NotImplementedError

    def _require(self, sample: int) -> None:
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} of {self._samples}")

    def batch(
        self, iteration: int, dp: int, data: int, micro_batch_size: int, global_batch_size: int
    ) -> Dict[str, NDArray[np.int64]]:
        """`tokens` [micro-batches, micro_batch_size, sequence_length + 1]: the share of replica `dp` of `data`.

        `number` [micro-batches, micro_batch_size] says which samples these are: no two of a run have the same.
        The share belongs to the global batch of `iteration` (from 1), the samples that follow those of the one before.
        Replicas take micro-batches in turn, as in Megatron: together they have the same global batch whatever `data`
        and `micro_batch_size` are; their product divides `global_batch_size`.
        """
        first = self._start.consumed(iteration - 1, global_batch_size)
        own = np.arange(first, first + global_batch_size).reshape(-1, data, micro_batch_size)[:, dp]
        samples = np.stack([self.tokens(sample) for sample in own.ravel().tolist()])
        return {
            "tokens": samples.reshape(own.shape + (self._sequence_length + 1,)),
            "number": own + self._first_number,
        }


class GptSamples(Samples):
    """The `samples` samples of one split of the indexed dataset `prefix`, each of `sequence_length + 1` tokens.

    `split` has the weights of `SPLITS`, `name` is one of these. The order follows from `seed`; the index maps lie
    beside the data, or in a cache (see `megatron_ext.data.map_places`).

    Raises:
        DataError: the data or their index maps cannot be used, or the split has too few tokens for one sample.
    """

    def __init__(
        self,
        prefix: Union[str, Path],
        split: Sequence[float],
        name: str,
        samples: int,
        sequence_length: int,
        seed: int,
        vocab_size: int,
        start: Position = BEGINNING,
        cache: Optional[str] = None,
    ) -> None:
        super().__init__(name, samples, sequence_length, start)
        self._data = IndexedDataset(prefix)
        documents = split_documents(split, len(self._data))[SPLITS.index(name)]
        self._maps = build_or_load(prefix, self._data, documents, name, samples, sequence_length, seed, cache)
        self._vocab_size = vocab_size
        tokens = int(self._data.lengths[documents.start : documents.stop].sum(dtype=np.int64))
        plan = layout(tokens, samples, sequence_length)
        self.order: Dict[str, float] = {
            "first_document": documents.start,
            "documents": len(documents),
            "tokens": tokens,
            "sequence_length": sequence_length,
            "seed": seed,
            "epochs": plan.epochs,
            "shuffled_together": plan.shuffled_together,
        }

    def tokens(self, sample: int) -> NDArray[np.int64]:
        self._require(sample)
        tokens = sample_tokens(self._data, self._maps, sample)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self._data.bin}: sample {sample} has token id {low if low < 0 else high}, but "
                f"model.vocab_size={self._vocab_size} allows 0 to {self._vocab_size - 1}; the data were prepared with "
                "another tokenizer: set model.vocab_size to that tokenizer's, or prepare the data anew"
            )
        return tokens
