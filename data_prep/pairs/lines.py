"""Pairs from files of lines: two plain files (Moses' form), or one with a tab between source and target."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.archives import SUFFIXES, Decompressed, files_below
from data_prep.pairs.pair import Languages, Pair
from data_prep.tokenizers.special import finished_words
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import words_of
from megatron_ext.data.samples import SPLITS

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
    """Line k of two files; `rule` says what line k of one is. Raises DataPrepError: they have not equally many lines,
    or as `lines` does."""
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
    """The lines of a file of UTF-8 that may be compressed, without their ends. Raises DataPrepError: it cannot be read
    or is not UTF-8; it names the line."""
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


_VOCABULARY = re.compile(r"vocab\.(bpe\.\d+)$")
TEST = "newstest2014"
VALID = "newstest_dev"


@dataclass(frozen=True)
class Finished:
    """Files of lines of tokens, and where there are any, the same lines as they were written."""

    vocabulary: Path
    tokens: dict[tuple[str, str], Path]
    """Files by split and language; a split may be missing, but for training."""
    plain: dict[tuple[str, str], Path]

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.vocabulary, *self.tokens.values(), *self.plain.values())

    def tokenizer(self) -> JsonTokenizer:
        """Its first four ids are special, the others the words of the vocabulary, as in the GNMT examples."""
        return finished_words(self.words())

    @property
    def has_numbers(self) -> bool:
        """Whether the lines of the vocabulary hold more than its words."""
        return self.words() != list(lines(self.vocabulary))

    def words(self) -> list[str]:
        """Returns the words of the vocabulary."""
        return words_of(lines(self.vocabulary), self.vocabulary)


def is_finished(path: Path) -> bool:
    return path.is_dir() and any(_VOCABULARY.match(file.name) for file in path.iterdir())


def finished(folder: Path, languages: Languages) -> Finished:
    """What is in such a folder. Raises DataPrepError: it lacks the training pairs."""
    names = {file.name: file for file in files_below(folder) if file.parent == folder}
    found = next(match for match in map(_VOCABULARY.match, sorted(names)) if match)
    bpe = found[1]
    stems = {"train": _stem(names, ["train"], bpe, languages)}
    if stems["train"] is None:
        raise DataPrepError(
            f"--source {folder}: {found[0]} is there, but not train.tok.clean.{bpe}.{languages.source} and "
            f".{languages.target}, as the GNMT examples' prepare_dataset.sh makes them; let it finish, or correct "
            "--source-lang and --target-lang"
        )
    news = sorted({name.split(".")[0] for name in names if name.startswith("newstest")}, reverse=True)
    stems["test"] = _stem(names, [TEST, *(name for name in news if name != VALID)], bpe, languages)
    test = (stems["test"] or "").split(".")[0]
    stems["valid"] = _stem(names, [VALID, *(name for name in news if name != test)], bpe, languages)
    tokens = {
        (split, language): names[f"{stem}.{language}"]
        for split in SPLITS
        for language in languages
        if (stem := stems[split]) is not None
    }
    plain = {
        (split, language): names[f"{test}.{language}"]
        for split, language in tokens
        if split == "test" and f"{test}.{language}" in names
    }
    return Finished(names[found[0]], tokens, plain)


def _stem(names: dict[str, Path], candidates: Sequence[str], bpe: str, languages: Languages) -> str | None:
    """The first file name before its language that is there in both."""
    stems = [f"{name}.{form}{bpe}" for name in candidates for form in ("tok.clean.", "tok.", "")]
    return next((stem for stem in stems if all(f"{stem}.{language}" in names for language in languages)), None)
