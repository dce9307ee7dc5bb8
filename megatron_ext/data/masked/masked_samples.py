"""Samples made of sentences, of which tokens are hidden: what BERT's and T5's have in common.

Tokens are hidden as megatron-core's MaskedWordPieceDataset does it. Words of a sample come in a random order; from each
a run of one to `max_ngram` words is hidden, until as many tokens are hidden as `mask_prob` says. Random numbers are
drawn as there, so that a sample is the same there and here.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Masking
from megatron_ext.data.index_maps import split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.masked.sentence_maps import Cut, build_or_load
from megatron_ext.data.masked.vocabulary import VOCABULARY, Vocabulary
from megatron_ext.data.samples import SPLITS, Samples, Split, check_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


SPAN_ENDS = 0.2
"""How probable it is at each word that a span ends with it, where lengths are geometric (SpanBERT, section 3.1)."""


class Span(NamedTuple):
    """Tokens that are hidden together."""

    places: List[int]
    tokens: List[int]
    """That stood there."""


class Masked(NamedTuple):
    """A sample of which tokens are hidden."""

    tokens: List[int]
    spans: List[Span]
    """In the order of their places."""

    def hidden(self) -> Tuple[List[int], List[int]]:
        """Places and tokens of all spans."""
        places = [place for span in self.spans for place in span.places]
        return places, [token for span in self.spans for token in span.tokens]


class Masker:
    """Hides tokens of samples."""

    def __init__(self, how: Masking, begins: NDArray[np.bool_], apart: Sequence[int]) -> None:
        """`begins` [vocabulary]: whether a token begins a word; `apart`: tokens that are never hidden."""
        self._how = how
        self._begins = begins
        self._apart = set(apart)
        shares = 1.0 / (np.arange(how.max_ngram, dtype=np.int64) + 1)
        shares = shares / shares.sum(keepdims=True)
        if how.longer_ngrams:
            shares = shares[::-1]
        shares = shares / shares.sum(keepdims=True)
        cumulated = shares.cumsum()
        cumulated /= cumulated[-1]
        self._cumulated: List[float] = cumulated.tolist()

    def masked(
        self,
        tokens: List[int],
        aim: int,
        random: np.random.RandomState,
        instead: Callable[[np.random.RandomState], Optional[int]],
    ) -> Masked:
        """Hides tokens of a sample that aims at `aim` of them; `instead` gives what a token becomes, None: itself."""
        how = self._how
        words = self._words(tokens)
        wanted = min(how.mask_prob * aim, max(1, round(len(tokens) * how.mask_prob)))
        order = np.arange(len(words))
        random.shuffle(order)
        found = list(tokens)
        hidden: Set[int] = set()
        spans: List[Span] = []
        for first in order.tolist():
            if len(hidden) >= wanted:
                break
            places = self._fitting(words, first, self._drawn(random), wanted - len(hidden))
            if not places or not hidden.isdisjoint(places):
                continue
            hidden.update(places)
            for place in places:
                token = instead(random)
                if token is not None:
                    found[place] = token
            spans.append(Span(places, [tokens[place] for place in places]))
        spans.sort(key=lambda span: span.places[0])
        return Masked(found, spans)

    def _words(self, tokens: List[int]) -> List[List[int]]:
        """The places of each word, or of each token where words are not hidden whole."""
        words: List[List[int]] = []
        for place, (token, begins) in enumerate(zip(tokens, self._begins[tokens].tolist())):
            if token in self._apart:
                continue
            if begins or not self._how.full_word or not words:
                words.append([place])
            else:
                words[-1].append(place)
        return words

    def _drawn(self, random: np.random.RandomState) -> int:
        """How many words a run may have."""
        if self._how.geometric:
            return min(int(random.geometric(SPAN_ENDS)), self._how.max_ngram)
        return bisect_right(self._cumulated, float(random.random_sample())) + 1

    @staticmethod
    def _fitting(words: List[List[int]], first: int, longest: int, most: float) -> List[int]:
        """The places of at most `longest` words from `first` on, no more of them than `most`; none, if one is more."""
        for count in range(longest, 0, -1):
            places = [place for word in words[first : first + count] for place in word]
            if len(places) <= most:
                return places
        return []


NEVER_HIDDEN = ("cls", "sep")


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
        cut: Cut,
        special: Sequence[str],
    ) -> None:
        """`special` are the special tokens that the samples need."""
        super().__init__(split.samples, split.name)
        self._data = IndexedDataset(prefix)
        self._vocabulary = vocabulary_for(prefix, vocab_size, special)
        self._special = dict(zip(special, self._vocabulary.require(prefix, *special)))
        documents = split_documents(split.weights, self._data.documents)[SPLITS.index(split.name)]
        self._map = build_or_load(prefix, self._data, documents, split.name, cut, split.cache)
        self.in_epoch = len(self._map) if split.samples == 1 else None  # maps end with an epoch
        self._seed = split.seed
        apart = self._vocabulary.require(prefix, *NEVER_HIDDEN)
        self._masker = Masker(masking, self._vocabulary.word_begins(), apart)
        sentences = slice(*self._data.boundaries[[documents.start, documents.stop]].tolist())
        self.order: Dict[str, float] = {
            "first_document": documents.start,
            "documents": len(documents),
            "sentences": sentences.stop - sentences.start,
            "tokens": int(self._data.lengths[sentences].sum(dtype=np.int64)),
            "length": cut.length,
            "least_sentences": cut.least_sentences,
            "seed": split.seed,
            "mapped": len(self._map),
            **{key: float(value) for key, value in asdict(masking).items()},
        }

    def drawn(self, number: int) -> Tuple[List[List[int]], int, np.random.RandomState]:
        """A sample's sentences, the tokens that it aims at, and the random numbers of what is done with them. Raises
        DataError: a token is not in the vocabulary."""
        first, stop, aim = self._map[number].tolist()
        sentences = [self._data[sentence] for sentence in range(first, stop)]
        for place, tokens in enumerate(sentences):
            what = partial("{}: sentence {}".format, self._data.bin, first + place)
            check_token_ids(
                tokens, self._vocabulary.size, what, "the vocabulary beside the data", "prepare the data again"
            )
        random = np.random.RandomState((self._seed + number) % 2**32)
        return [tokens.tolist() for tokens in sentences], aim, random


def masking_of(plan: Plan) -> Masking:
    """What a plan of bert or t5 has, as its rules say."""
    assert plan.data_masking is not None
    return plan.data_masking


def vocabulary_for(prefix: Union[str, Path], vocab_size: int, special: Sequence[str]) -> Vocabulary:
    """The vocabulary of data, which has these special tokens and fits a model's. Raises DataError: it has not, does
    not, or cannot be read."""
    vocabulary = Vocabulary.read(prefix)
    vocabulary.require(prefix, *special, *NEVER_HIDDEN)
    if vocabulary.size > vocab_size:
        raise DataError(
            f"{prefix} was made with a vocabulary of {vocabulary.size}, but model.vocab_size={vocab_size}; set "
            f"model.vocab_size={vocabulary.size}, or choose other data"
        )
    if "bos" in special and not vocabulary.sentinels:
        raise DataError(
            f"{prefix}{VOCABULARY}: the tokenizer has no sentinels, which T5 needs for the spans that it writes; "
            "prepare the data with --vocab-extra-ids 100"
        )
    return vocabulary


def padded(values: List[int], length: int, fill: int) -> NDArray[np.int64]:
    """[length]: the values, then `fill`."""
    found = np.full(length, fill, np.int64)
    found[: len(values)] = values
    return found
