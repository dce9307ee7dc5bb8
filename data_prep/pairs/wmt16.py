"""The finished WMT16 folder of the GNMT examples: text that Moses and subword-nmt have cut into tokens already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.archives import files_below
from data_prep.pairs.lines import lines
from data_prep.pairs.pair import SPLITS, Languages
from data_prep.tokenizers.special import finished_words
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import words_of

_VOCABULARY = re.compile(r"vocab\.(bpe\.\d+)$")
TEST = "newstest2014"
VALID = "newstest_dev"


@dataclass(frozen=True)
class Finished:
    """Files of lines of tokens, and where there are any, the same lines as they were written."""

    vocabulary: Path
    tokens: dict[tuple[str, str], Path]
    """By split and language; a split may be missing, but for training."""
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
        """Those of the vocabulary."""
        return words_of(lines(self.vocabulary), self.vocabulary)


def is_finished(path: Path) -> bool:
    return path.is_dir() and any(_VOCABULARY.match(file.name) for file in path.iterdir())


def finished(folder: Path, languages: Languages) -> Finished:
    """What is in such a folder.

    Raises:
        DataPrepError: it lacks the training pairs.
    """
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
