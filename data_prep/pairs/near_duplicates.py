"""Sentences that are nearly those of the validation and test sets, which training must not see.

Sentences are compared as words in the form of Unicode's NFKC, without capitals and punctuation. Two are nearly the
same if the sets of their runs of two words (beginning and end count as words) have at least `THRESHOLD` of all their
runs in common (the Jaccard index). Such sets must share one of the rarest runs of each, so that only sentences that
share one are compared at all: the prefix filter of S. Chaudhuri et al., "A primitive operator for similarity joins in
data cleaning" (ICDE 2006). The result is exact.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from data_prep.pairs.pair import Pair, words

THRESHOLD = 0.7
_NO_WORD = re.compile(r"[^\w\s]|_")
Runs = frozenset[str]


def runs(sentence: str) -> Runs:
    """The runs of two words of a sentence in its compared form; none of one without words."""
    text = unicodedata.normalize("NFKC", sentence).casefold()
    found = words(_NO_WORD.sub(" ", text))
    return frozenset(map(" ".join, zip(["", *found], [*found, ""], strict=True))) if found else frozenset()


def jaccard(one: Runs, other: Runs) -> float:
    common = len(one & other)
    return common / (len(one) + len(other) - common)


@dataclass(frozen=True)
class Sentences:
    """Of one side of the held-out pairs; it goes to other processes by pickle."""

    held: tuple[Runs, ...]
    frequency: Counter[str] = field(default_factory=Counter)
    """In how many held-out sentences a run is."""
    by_rare_run: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Sentences:
        held = tuple({found: None for found in map(runs, sentences) if found})
        made = cls(held, Counter(run for found in held for run in found))
        for number, found in enumerate(held):
            for run in made._rarest(found):
                made.by_rare_run.setdefault(run, []).append(number)
        return made

    def nearly_has(self, sentence: str) -> bool:
        own = runs(sentence)
        if not own:
            return False
        candidates = {number for run in self._rarest(own) for number in self.by_rare_run.get(run, ())}
        return any(jaccard(own, self.held[number]) >= THRESHOLD for number in candidates)

    def _rarest(self, found: Runs) -> list[str]:
        """So many of the rarest runs that a set which shares none of them is too unlike."""
        ordered = sorted(found, key=lambda run: (self.frequency[run], run))
        return ordered[: len(found) - math.ceil(THRESHOLD * len(found)) + 1]


@dataclass(frozen=True)
class HeldOut:
    """Both sides of the held-out pairs."""

    source: Sentences
    target: Sentences

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> HeldOut:
        held = list(pairs)
        return cls(Sentences.of(pair.source for pair in held), Sentences.of(pair.target for pair in held))

    def nearly_has(self, pair: Pair) -> bool:
        """Whether either side of a pair is nearly that of a held-out one."""
        return self.source.nearly_has(pair.source) or self.target.nearly_has(pair.target)
