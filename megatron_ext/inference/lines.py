"""Text in, text out: a line each."""

from __future__ import annotations

from typing import Iterable, Iterator, List

from megatron_ext.inference.scoring import Scoring
from megatron_ext.inference.text import TextTokenizer
from megatron_ext.inference.translator import Translator

AT_ONCE = 512
"""Lines that are read before the first of them is translated, so that those of like length go together."""


def translated(
    lines: Iterable[str], translator: Translator, tokenizer: TextTokenizer, scoring: Scoring
) -> Iterator[str]:
    """A translation for every line, in their order; an empty line stays empty."""
    waiting: List[str] = []
    for line in lines:
        waiting.append(line.strip())
        if len(waiting) == AT_ONCE:
            yield from _of(waiting, translator, tokenizer, scoring)
            waiting = []
    yield from _of(waiting, translator, tokenizer, scoring)


def _of(lines: List[str], translator: Translator, tokenizer: TextTokenizer, scoring: Scoring) -> Iterator[str]:
    ids = [tokenizer.encode(line) if line else [] for line in lines]
    for tokens in translator.translate(ids, scoring):
        yield " ".join(tokenizer.decode(tokens).split("\n"))
