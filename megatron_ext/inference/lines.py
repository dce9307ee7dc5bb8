"""Text in, text out: a line each."""

from __future__ import annotations

from itertools import islice
from queue import Empty, Queue
from threading import Thread
from typing import Iterable, Iterator, List, Optional

from megatron_ext.inference.scoring import Scoring
from megatron_ext.inference.text import TextTokenizer
from megatron_ext.inference.translator import Translator

AT_ONCE = 512
"""Lines that are translated together at most, so that those of like length go together."""
PATIENCE_S = 0.02
"""Until the next live line is there: those of a file that is piped come at once."""


def translated(
    lines: Iterable[str], translator: Translator, tokenizer: TextTokenizer, scoring: Scoring, live: bool = False
) -> Iterator[str]:
    """A translation for every line, in their order; an empty line stays empty.

    `live` lines are translated as they come, for somebody may wait for the answer before the next one.
    """
    for waiting in as_they_come(lines) if live else _all_there(lines):
        stripped = [line.strip() for line in waiting]
        for tokens in translator.translate([tokenizer.encode(line) if line else [] for line in stripped], scoring):
            yield " ".join(tokenizer.decode(tokens).split("\n"))


def as_they_come(lines: Iterable[str]) -> Iterator[List[str]]:
    """What has come, and comes within `PATIENCE_S`: at least a line, at most `AT_ONCE`.

    Raises:
        OSError, ValueError: reading the lines did.
    """
    arrived: Queue[List[str]] = Queue(AT_ONCE)
    failed: List[Exception] = []

    def read() -> None:
        try:
            for line in lines:
                arrived.put([line])
        except (OSError, ValueError) as error:  # for the one who waits for the lines
            failed.append(error)
        finally:
            arrived.put([])

    Thread(target=read, daemon=True).start()
    waiting: List[str] = []
    came: Optional[List[str]] = None
    while came != []:
        try:
            came = arrived.get(timeout=PATIENCE_S if waiting else None)
        except Empty:
            came = None
        waiting += came or []
        if waiting and (not came or len(waiting) == AT_ONCE):
            yield waiting
            waiting = []
    if failed:
        raise failed[0]


def _all_there(lines: Iterable[str]) -> Iterator[List[str]]:
    iterator = iter(lines)
    while waiting := list(islice(iterator, AT_ONCE)):
        yield waiting
