"""A sentence and its translation, as they stand in a source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

SPLITS = ("train", "valid", "test")
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
    """Of the languages found the one that is asked for: the very same, or else the first by length and name."""
    fitting = sorted((code for code in found if same_language(asked, code)), key=lambda code: (len(code), code))
    return fitting[0] if fitting else None


def words(text: str) -> list[str]:
    return _WORD.findall(text)
