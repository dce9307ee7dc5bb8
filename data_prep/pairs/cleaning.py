"""Which pairs are fit to be learned from."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from data_prep.pairs.pair import Pair, words
from data_prep.text.formats import digest


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits for the words on each side of a pair."""

    min_words: int = 1
    max_words: int = 80
    max_ratio: float = 3.0
    """The most words of the longer side for each word of the shorter side."""


def fault(pair: Pair, rules: Rules) -> str | None:
    """Why a pair, its spaces tidied, is left out: `empty`, `untranslated`, `short`, `long` or `ratio`; None if not."""
    if not (pair.source and pair.target):
        return "empty"
    if pair.source == pair.target:
        return "untranslated"
    few, many = sorted((len(words(pair.source)), len(words(pair.target))))
    if few < rules.min_words:
        return "short"
    if many > rules.max_words:
        return "long"
    return "ratio" if many > rules.max_ratio * few else None


def tidy(pair: Pair) -> Pair:
    """Single spaces between words, none around: a sentence is a line."""
    return pair._replace(source=" ".join(pair.source.split()), target=" ".join(pair.target.split()))


class Cleaner:
    """Leaves out unfit pairs and those that were there before; it remembers each pair in some 100 bytes of memory."""

    def __init__(self, rules: Rules, kept: Iterable[Pair] = ()) -> None:
        """Goes on after these pairs."""
        self._rules = rules
        self._seen = {_digest(pair) for pair in kept}

    def cleaned(self, pairs: Iterable[Pair]) -> Iterator[tuple[Pair, str | None]]:
        """Each pair, tidied, and why it is left out; None if it is not."""
        for pair in map(tidy, pairs):
            why = fault(pair, self._rules)
            if why is None:
                own = _digest(pair)
                why = "duplicate" if own in self._seen else None
                self._seen.add(own)
            yield pair, why


def _digest(pair: Pair) -> bytes:
    return digest(f"{pair.split}\t{pair.source}\t{pair.target}")


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
    """One side of the held-out pairs, which goes to other processes by pickle."""

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
