"""Which pairs are fit to be learned from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_prep.pairs.pair import Pair, words
from data_prep.text.formats import digest


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Of the words on each side."""

    min_words: int = 1
    max_words: int = 80
    max_ratio: float = 3.0
    """Of the longer side's words to the shorter side's."""


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
