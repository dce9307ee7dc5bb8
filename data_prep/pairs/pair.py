"""A sentence and its translation, as they stand in a source."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from data_prep.errors import DataPrepError
from megatron_ext.data.samples import SPLITS

SIDES = ("source", "target")
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
    """What each pair is split with, if it is to be split: its page, or a run of pairs.

    Args:
        pairs: all, in their order.
        without_page: how many of those that are to be split have no page.
    """
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
        weights: of training, validation and test.
        seed: other seeds hold out other groups.
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
