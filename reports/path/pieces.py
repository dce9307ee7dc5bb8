"""What a rank does in an iteration, one thing after another: events that nest, cut where another begins or ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GAP = -1
"""In the place of an event: nothing was recorded."""


class Span(NamedTuple):
    """An event of a rank; times in ns."""

    start: int
    end: int
    event: int
    """Its number."""


class Piece(NamedTuple):
    """A part of an event that no other event lies inside of; times in ns."""

    start: int
    end: int
    event: int
    """The number of the event, or GAP."""


def pieces(begin: int, spans: Sequence[Span]) -> list[Piece]:
    """Cuts the events of a rank into pieces that follow each other without a gap, from `begin` to the latest end.

    What lies inside an event takes its time from it; one that goes on when another begins, and ends before that, ends
    there. An event without any length is a piece without any length.

    Args:
        spans: by start; of those that start together, the longest first.
    """
    found: list[Piece] = []
    around: list[Span] = []
    now = begin

    def go(until: int, event: int) -> None:
        nonlocal now
        if until > now:
            found.append(Piece(now, until, event))
            now = until

    def close(until: int) -> None:
        span = around.pop()
        if span.start == span.end:
            found.append(Piece(now, now, span.event))
        go(min(span.end, until), span.event)

    for span in spans:
        while around and (around[-1].end <= span.start or around[-1].end < span.end):
            close(span.start)
        go(span.start, around[-1].event if around else GAP)
        around.append(span)
    while around:
        close(around[-1].end)
    return found
