"""Samples made of sentences: what BERT's and T5's have in common."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List, Sequence, Tuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan import Masking
from megatron_ext.data.index_maps import split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.masking import Masker
from megatron_ext.data.samples import SPLITS, Samples, Split
from megatron_ext.data.sentence_maps import Cut, build_or_load
from megatron_ext.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MaskedSamples(Samples):
    """A split of the indexed dataset `prefix`, whose sequences are sentences, with some of their tokens hidden.

    Raises:
        DataError: the data, their vocabulary or their sentence map cannot be used, or the split gives no sample.
    """

    def __init__(
        self,
        prefix: Union[str, Path],
        split: Split,
        vocab_size: int,
        masking: Masking,
        length: int,
        least_sentences: int,
        special: Sequence[str],
    ) -> None:
        """Samples aim at `length` tokens of the text; `special` are the special tokens that they need."""
        super().__init__(split.samples, split.name)
        self._data = IndexedDataset(prefix)
        self._prefix = prefix
        self._vocabulary = Vocabulary.read(prefix)
        self._special = dict(zip(special, self._vocabulary.require(prefix, *special)))
        if self._vocabulary.size > vocab_size:
            raise DataError(
                f"{prefix} was made with a vocabulary of {self._vocabulary.size}, but model.vocab_size={vocab_size}; "
                f"set model.vocab_size={self._vocabulary.size}, or choose other data"
            )
        documents = split_documents(split.weights, self._data.documents)[SPLITS.index(split.name)]
        cut = Cut(split.samples, length, masking.short_seq_prob, split.seed, least_sentences)
        self._map = build_or_load(prefix, self._data, documents, split.name, cut, split.cache)
        self._seed = split.seed
        apart = self._vocabulary.require(prefix, "cls", "sep")
        self._masker = Masker(masking, self._vocabulary.word_begins(), apart)
        sentences = slice(*self._data.boundaries[[documents.start, documents.stop]].tolist())
        self.order: Dict[str, float] = {
            "first_document": documents.start,
            "documents": len(documents),
            "sentences": sentences.stop - sentences.start,
            "tokens": int(self._data.lengths[sentences].sum(dtype=np.int64)),
            "length": length,
            "least_sentences": least_sentences,
            "seed": split.seed,
            "mapped": len(self._map),
            **{key: float(value) for key, value in asdict(masking).items()},
        }

    def drawn(self, number: int) -> Tuple[List[List[int]], int, np.random.RandomState]:
        """A sample's sentences, the tokens that it aims at, and the random numbers of what is done with them.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        first, stop, aim = self._map[number].tolist()
        size = self._vocabulary.size
        sentences = [self._data[sentence] for sentence in range(first, stop)]
        for place, tokens in enumerate(sentences):
            if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= size):
                wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
                raise DataError(
                    f"{self._data.bin}: sentence {first + place} has token id {wrong}, but the vocabulary beside the "
                    f"data allows 0 to {size - 1}; prepare the data anew"
                )
        random = np.random.RandomState((self._seed + number) % 2**32)
        return [tokens.tolist() for tokens in sentences], aim, random


def padded(values: List[int], length: int, fill: int) -> NDArray[np.int64]:
    """[length]: the values, then `fill`."""
    found = np.full(length, fill, np.int64)
    found[: len(values)] = values
    return found
