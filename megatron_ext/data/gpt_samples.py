"""The training samples of a GPT model, in Megatron's order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Sequence, Union

import numpy as np

from megatron_ext.data.index_maps import build_or_load, layout, require_one_sample, sample_tokens, split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.samples import SPLITS, Samples, Split, check_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

OTHER_TOKENIZER = (
    "the data were prepared with another tokenizer: set model.vocab_size to that tokenizer's, or prepare the data again"
)


class GptSamples(Samples):
    """A split of the indexed dataset `prefix`: samples of `sequence_length + 1` tokens, under the name `tokens`.

    The order follows from the split's seed; the index maps lie beside the data, or in a cache (see
    `megatron_ext.data.map_places`).

    Raises:
        DataError: the data or their index maps cannot be used, or the split has too few tokens for one sample.
    """

    def __init__(self, prefix: Union[str, Path], split: Split, sequence_length: int, vocab_size: int) -> None:
        super().__init__(split.samples, split.name)
        self._data = IndexedDataset(prefix)
        documents = split_documents(split.weights, len(self._data))[SPLITS.index(split.name)]
        self._maps = build_or_load(
            prefix, self._data, documents, split.name, split.samples, sequence_length, split.seed, split.cache
        )
        self._vocab_size = vocab_size
        self._vocabulary = f"model.vocab_size={vocab_size}"
        self.order = order_of(self._data.lengths, documents, split.samples, sequence_length, split.seed)
        self.in_epoch = (int(self.order["tokens"]) - 1) // sequence_length

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        return {"tokens": self.tokens(number)}

    def tokens(self, sample: int) -> NDArray[np.int64]:
        """[sequence_length + 1]: the token ids of one sample; the last is only predicted, the first only read. Raises
        DataError: an id is not in the vocabulary."""
        tokens = sample_tokens(self._data, self._maps, sample)
        what = partial("{}: sample {}".format, self._data.bin, sample)
        check_token_ids(tokens, self._vocab_size, what, self._vocabulary, OTHER_TOKENIZER)
        return tokens


def order_of(
    lengths: NDArray[np.int32], documents: range, samples: int, sequence_length: int, seed: int
) -> Dict[str, float]:
    """`Samples.order` of so many samples of these documents; `lengths` (tokens) are those of all."""
    tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    plan = layout(tokens, samples, sequence_length)
    return {
        "first_document": documents.start,
        "documents": len(documents),
        "tokens": tokens,
        "sequence_length": sequence_length,
        "seed": seed,
        "epochs": plan.epochs,
        "shuffled_together": plan.shuffled_together,
    }


def samples_in_epoch(prefix: Union[str, Path], weights: Sequence[float], split: str, sequence_length: int) -> int:
    """The samples of `train`, `valid` or `test` before any of its tokens comes again. Raises DataError: the data cannot
    be used, or the split has too few tokens for one sample."""
    data = IndexedDataset(prefix)
    documents = split_documents(weights, len(data))[SPLITS.index(split)]
    require_one_sample(data, documents, split, sequence_length)
    tokens = int(data.lengths[documents.start : documents.stop].sum(dtype=np.int64))
    return (tokens - 1) // sequence_length
