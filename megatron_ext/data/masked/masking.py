"""Masked language modelling: which tokens of a sample are hidden, as megatron-core's MaskedWordPieceDataset does it.

Words of a sample come in a random order; from each a run of one to `max_ngram` words is hidden, until as many tokens
are hidden as `mask_prob` says. Random numbers are drawn as there, so that a sample is the same there and here.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Callable, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from megatron_ext.contract.plan_parts import Masking

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
