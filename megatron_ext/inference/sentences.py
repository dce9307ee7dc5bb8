"""The text of a split of pairs, which lies beside its token ids: what is to be translated, and its references."""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import why


class Sentences(NamedTuple):
    """Line k of the target is the translation of that of the source."""

    source: List[str]
    target: List[str]


def read_sentences(prefix: str, split: str) -> Sentences:
    """Reads the sentences of a split.

    Raises:
        OSError, UnicodeDecodeError: a file cannot be read.
        EngineError: they do not belong together.
    """
    sides = []
    for side in Sentences._fields:
        lines = Path(f"{prefix}-{split}.{side}.txt").read_text(encoding="utf-8").split("\n")
        sides.append(lines[:-1] if lines[-1] == "" else lines)
    found = Sentences(*sides)
    if len(found.source) != len(found.target):
        raise EngineError(
            f"{prefix}-{split}.source.txt has {len(found.source)} lines, and .target.txt has {len(found.target)}; line "
            "k of one must be the translation of that of the other: prepare the pairs again"
        )
    return found


def tokenizer_file(prefix: str) -> Path:
    """The tokenizer.json of both languages."""
    return Path(f"{prefix}.tokenizer.json")


def held_out(prefix: str, split: str) -> Sentences:
    """The same for an evaluation that cannot do without; the tokenizer is there, too. Raises EngineError: something is
    missing, cannot be read, or has no sentence."""
    try:
        tokenizer_file(prefix).read_text(encoding="utf-8")
        found = read_sentences(prefix, split)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"BLEU compares text, which cannot be read: {why(error)}; 'tdpp data pairs' writes it and the tokenizer "
            "beside the pairs"
        ) from error
    if not found.source:
        raise EngineError(f"{prefix}-{split}.source.txt has no sentences, so BLEU cannot be computed")
    return found
