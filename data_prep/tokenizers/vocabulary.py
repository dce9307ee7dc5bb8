"""Vocabularies as files of lines, with or without a number beside each word; and what text a vocabulary lacks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError
from megatron_ext.contract.files import read_regular
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.pairs import FEW_UNKNOWN, MOST_UNKNOWN

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")

_BLANKS = re.compile(r"[ \t]+")
"""What stands between a word and its number; a word may be any other space, such as U+00A0."""


def words_of(lines: Iterable[str], path: Path) -> list[str]:
    """The words of a vocabulary, a line each, by their ids.

    Beside each may stand how often it occurs or how likely it is, after it (subword-nmt, fairseq, SentencePiece) or
    before it (`uniq -c`); or its id.

    Raises:
        DataPrepError: only some lines have a number.
    """
    rows = [line.strip("\r\n\ufeff") for line in lines]
    fields = [_BLANKS.split(row.strip(" \t")) for row in rows if row.strip(" \t")]
    for word, number in ((0, 1), (1, 0)):
        numbered = [row for row in fields if len(row) == 2 and _NUMBER.fullmatch(row[number])]
        if fields and len(numbered) == len(fields):
            return _by_id([row[word] for row in fields], [row[number] for row in fields])
        if 2 * len(numbered) > len(fields):
            odd = next(row for row in fields if row not in numbered)
            raise DataPrepError(
                f"{path}: {len(numbered)} of {len(fields)} lines have a number beside the word, but {' '.join(odd)!r} "
                "has none; give a file with one word per line, or with a word and a number on every line"
            )
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _by_id(words: list[str], numbers: list[str]) -> list[str]:
    """Returns words as they stand in the file, or by their numbers where these are ids."""
    ids = [int(number) if number.isdecimal() else -1 for number in numbers]
    if sorted(ids) != list(range(len(words))):
        return words
    return [word for _, word in sorted(zip(ids, words, strict=True))]


def unknown_id(content: str) -> int | None:
    """Which id a tokenizer.json gives to what its vocabulary lacks; None where it lacks nothing or does not say."""
    try:
        settings = json.loads(content)
        model = settings["model"]
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        added = {token["content"]: token["id"] for token in settings.get("added_tokens", [])}
        found = {**added, **model["vocab"]}.get(model.get("unk_token")) if isinstance(model["vocab"], dict) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def unknown_id_beside(path: Path) -> int | None:
    """The same for the file beside prepared data, which may not be there."""
    try:
        return unknown_id(read_regular(path).decode())
    except (OSError, UnicodeDecodeError):
        return None


def doubt(unknown: int, tokens: int, what: str, way_out: str) -> str | None:
    """What to say of tokens of which so many are unknown; None where that is usual. Raises DataPrepError: nearly all
    are."""
    share = unknown / max(tokens, 1)
    text = f"{what}: {unknown} of {tokens} tokens ({100 * share:.3g}%) are not in the vocabulary; {way_out}"
    if share > MOST_UNKNOWN:
        raise DataPrepError(text)
    return text if share > FEW_UNKNOWN else None


def warn(text: str | None) -> None:
    """Prints a doubt on stderr."""
    if text is not None:
        print(f"warning: {text}", file=sys.stderr)


def shown(words: Sequence[str]) -> str:
    """The first words of a vocabulary, for a message."""
    return f"{len(words)} words, which begin with {', '.join(map(repr, words[:3]))}"


BLOCK = 1 << 24
"""Tokens that are looked at once."""
SAMPLED = (64, 1 << 16)
"""Places that a launch looks at, and the tokens of each."""
TOKENIZER = ".tokenizer.json"
"""What the tokeniser's file beside the data ends in."""
WAY_OUT = "prepare the data again, with the vocabulary of this text"


def unknown_doubt(data: IndexedDataset, prefix: Path, given: str, *, in_full: bool) -> str | None:
    """What to say of the unknown tokens of indexed data; None where there are few, or nobody knows.

    Args:
        data: tokens.
        prefix: whose tokenizer lies beside it.
        given: names the data.
        in_full: looks at all tokens, not only at some.

    Raises:
        DataPrepError: nearly all are unknown.
    """
    unknown = unknown_id_beside(data_file(prefix, TOKENIZER))
    if unknown is None:
        return None
    places, size = SAMPLED
    if in_full or len(data.tokens) <= places * size:
        begins, size = np.zeros(1, np.int64), len(data.tokens)
    else:
        begins = np.unique(np.linspace(0, len(data.tokens) - size, places, dtype=np.int64))
    blocks = [data.tokens[begin : begin + size] for begin in begins.tolist()]
    found = sum(count_id(block, unknown) for block in blocks)
    return doubt(found, sum(map(len, blocks)), given, WAY_OUT)


def count_id(tokens: NDArray[np.integer], unknown: int) -> int:
    """How many of the tokens have this id; the memory it takes does not grow with them."""
    return sum(int((tokens[at : at + BLOCK] == unknown).sum()) for at in range(0, len(tokens), BLOCK))
