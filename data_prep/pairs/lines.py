"""Pairs from files of lines: two plain files (Moses' form), or one with a tab between source and target."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.compressed import SUFFIXES, Decompressed
from data_prep.pairs.pair import Pair

LONGEST = 1 << 20
"""Bytes of a line: sentences are shorter."""
HELD_OUT = {"valid": "valid", "val": "valid", "dev": "valid", "test": "test"}
"""How files are called that hold a split of their own."""


@dataclass(frozen=True)
class TwoFiles:
    """Line k of one file is the translation of line k of the other."""

    source: Path
    target: Path
    split: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.source, self.target)

    def pairs(self) -> Iterator[Pair]:
        for source, target in side_by_side(self.source, self.target, "the translation of line k of the other"):
            yield Pair(source, target, split=self.split)


@dataclass(frozen=True)
class TabSeparated:
    """Each line has the source, a tab and the target; further columns are passed over."""

    path: Path
    split: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def pairs(self) -> Iterator[Pair]:
        for number, line in enumerate(lines(self.path), 1):
            columns = line.split("\t")
            if len(columns) < 2:
                raise DataPrepError(
                    f"{self.path}:{number}: no tab in it; each line must have the source, a tab and the target"
                )
            yield Pair(columns[0], columns[1], split=self.split)


def side_by_side(one: Path, other: Path, rule: str) -> Iterator[tuple[str, str]]:
    """Line k of two files.

    Args:
        one: a file.
        other: another one.
        rule: what line k of one is.

    Raises:
        DataPrepError: they have not equally many lines, or as `lines` does.
    """
    counts = [0, 0]
    for first, second in zip_longest(lines(one), lines(other)):
        counts[0] += first is not None
        counts[1] += second is not None
        if first is not None and second is not None:
            yield first, second
    if counts[0] != counts[1]:
        raise DataPrepError(
            f"{one} has {counts[0]} lines, {other} has {counts[1]}: line k of one must be {rule}; give files with "
            "the same number of lines"
        )


def lines(path: Path) -> Iterator[str]:
    """The lines of a file of UTF-8 that may be compressed, without their ends.

    Raises:
        DataPrepError: it cannot be read or is not UTF-8; it names the line.
    """
    with Decompressed(path) as content:
        stream = io.BufferedReader(content, 1 << 18)
        number = 0
        while line := stream.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST:
                raise DataPrepError(f"{path}:{number}: a line longer than {LONGEST} bytes; give one sentence per line")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataPrepError(
                    f"{path}:{number}: not UTF-8 (byte {line[error.start]:#04x}); convert the file, such as by "
                    "'iconv -f latin1 -t utf-8'"
                ) from error


def split_named(path: Path) -> str:
    """The split that a file is called after, as `dev.de` and `test.tsv.gz` are; else empty."""
    return HELD_OUT.get(path.name.split(".")[0].lower(), "")


def without_compression(name: str) -> str:
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name
