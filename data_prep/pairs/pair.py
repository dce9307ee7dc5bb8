"""A sentence and its translation, as they stand in a source, and which of them are fit to be learned from."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from data_prep.errors import DataPrepError
from data_prep.text.formats import digest
from megatron_ext.data.samples import SPLITS

_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿]|[^\s぀-ヿ㐀-䶿一-鿿豈-﫿]+")
"""What stands between spaces; of Chinese and Japanese, which have none, each character."""


class Pair(NamedTuple):
    source: str
    target: str
    page: str = ""
    """What the pair is a part of and is split with; empty where there are no pages."""
    split: str = ""
    """One of `SPLITS` where the source says so; else empty."""


@dataclass(frozen=True)
class Languages:
    """Their codes, such as `de` and `en`."""

    source: str
    target: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.source, self.target))


class Reader(Protocol):
    """Pairs out of files of one kind, always in the same order."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All that the pairs follow from."""
        ...

    def pairs(self) -> Iterator[Pair]:
        """Raises DataPrepError: a file cannot be read or understood."""
        ...


def same_language(asked: str, found: str) -> bool:
    """Whether text of the language `found`, such as `en-US` or `de_DE`, is `asked` for, such as `en`."""
    asked, found = (code.replace("_", "-").lower() for code in (asked, found))
    return found == asked or found.startswith(f"{asked}-")


def code_of(asked: str, found: Iterable[str]) -> str | None:
    """Returns the language found that is asked for: the very same, or else the first by length and name."""
    fitting = sorted((code for code in found if same_language(asked, code)), key=lambda code: (len(code), code))
    return fitting[0] if fitting else None


def words(text: str) -> list[str]:
    return _WORD.findall(text)


LONGEST_RUN = 50
"""Pairs that follow each other and are split together: those beside each other in a file are often alike."""
LEAST_RUNS = 100
"""There are at least so many, as long as there are so many pairs."""


def groups(pairs: Iterable[Pair], without_page: int) -> Iterator[str]:
    """What each of all pairs is split with, if it is to be split: its page, or a run of pairs. `without_page`: how many
    of those that are to be split have no page."""
    size = max(1, min(LONGEST_RUN, without_page // LEAST_RUNS))
    number = 0
    for pair in pairs:
        if pair.split:
            yield ""
        elif pair.page:
            yield pair.page
        else:
            yield f"#{number // size}"
            number += 1


def splits_of(sizes: Mapping[str, int], weights: Sequence[float], seed: int, named: Iterable[str]) -> dict[str, str]:
    """The split of each group, so that the splits' pairs are in proportion to the weights, as near as groups allow.

    Whole groups go to the test set, in an order that seed and names alone decide, then to the validation set, until
    each has its share; the rest is for training. A split that has files of its own takes no group.

    Args:
        sizes: pairs by group.
        named: the splits that have files of their own.

    Raises:
        DataPrepError: there are too few groups.
    """
    there = set(named)
    wanted = {split: weight for split, weight in zip(SPLITS, weights, strict=True) if weight and split not in there}
    if not sizes:
        return {}
    if len(sizes) < len(wanted):
        raise DataPrepError(
            f"--split {','.join(f'{weight:g}' for weight in weights)}: {len(sizes)} pages or runs of pairs cannot be "
            f"divided among {', '.join(wanted)}; give more text, or set a weight to 0"
        )
    order = sorted(sizes, key=lambda group: hashlib.sha256(f"{seed}\0{group}".encode(errors="surrogatepass")).digest())
    found, taken = dict.fromkeys(order, "train"), 0
    total, shares = sum(sizes.values()), sum(wanted.values())
    held_out = [split for split in reversed(SPLITS) if split in wanted and split != "train"]
    for place, split in enumerate(held_out):
        share, count, left = total * wanted[split] / shares, 0, len(held_out) - place
        while count < max(1, share) and taken < len(order) - left:
            found[order[taken]] = split
            count += sizes[order[taken]]
            taken += 1
    return found


def counted(pairs: Iterable[Pair]) -> tuple[int, set[str]]:
    """How many pairs have neither page nor split, and the splits that have pairs of their own."""
    kinds = Counter((not pair.page and not pair.split, pair.split) for pair in pairs)
    return sum(count for (bare, _), count in kinds.items() if bare), {split for _, split in kinds if split}


KEPT = "kept"


def kept_line(pair: Pair) -> bytes:
    return json.dumps(pair).encode() + b"\n"


def kept_pairs(folder: Path) -> Iterator[Pair]:
    with (folder / KEPT).open(encoding="utf-8", newline="\n") as file:
        for text in file:
            yield Pair(*json.loads(text))


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
