"""Which kernels and messages of a log are in an order: those that share memory, and of which one writes, must be.

Streams are as CUDA has them: work of one stream is in the order in which the host gave it, and after what the host had
waited for by then; a wait for an event brings all that its stream had before the event was recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[str, int]
"""By stream, how much of its work has been done."""


class Access(NamedTuple):
    stream: str
    what: str
    start: int
    stop: int
    writes: bool


class Wait(NamedTuple):
    """Of a stream for another one."""

    line: int
    """Its number in the log."""
    who: str
    whom: str
    given: int
    """How much work `who` had been given before."""


class Race(NamedTuple):
    """Two that share memory, of which the second need not wait for the first."""

    first: Access
    second: Access


@dataclass
class Order:
    """Reads a log line by line."""

    races: list[Race] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    _done: defaultdict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    """By stream, what is done before what it is given next."""
    _host: Clock = field(default_factory=dict)
    _recorded: dict[str, tuple[str, Clock]] = field(default_factory=dict)
    _accesses: defaultdict[str, list[Access]] = field(default_factory=lambda: defaultdict(list))

    def read(self, number: int, line: str, *, ignored: bool = False) -> None:
        """`ignored`: as if a stream did not wait."""
        kind, _, rest = line.rstrip("\n").partition(" ")
        words = rest.split()
        if kind == "#" and words and words[0] in ("r", "w"):
            self._access(
                Access(words[1], words[4], int(words[2], 16), int(words[2], 16) + int(words[3]), words[0] == "w")
            )
        elif kind == "N":
            for at, writes in ((words.index("reads"), False), (words.index("writes"), True)):
                if words[at + 1] != "(nil)" and int(words[at + 2]):
                    start = int(words[at + 1], 16)
                    self._access(Access(words[1], words[2], start, start + int(words[at + 2]), writes))
        elif kind == "R":
            self._recorded[words[2]] = words[1], dict(self._now(words[1]))
        elif kind == "W" and words[2] in self._recorded:
            stream, clock = self._recorded[words[2]]
            if stream != words[1]:
                self.waits.append(Wait(number, words[1], stream, len(self._accesses[words[1]])))
                if not ignored:
                    _join(self._done[words[1]], clock)
        elif kind == "S":
            self._waited(words[1], words[2:])

    def _waited(self, call: str, of: list[str]) -> None:
        if call == "cudaEventSynchronize":
            _join(self._host, self._recorded.get(of[0], ("", {}))[1])
        elif call == "cudaStreamSynchronize":
            _join(self._host, self._now(of[0]))
        else:
            for stream in list(self._accesses):
                _join(self._host, self._now(stream))

    def _now(self, stream: str) -> Clock:
        """What is done when the stream has done all that it was given so far."""
        done = self._done[stream]
        _join(done, self._host)
        done[stream] = len(self._accesses[stream])
        return done

    def _access(self, own: Access) -> None:
        done = self._now(own.stream)
        for stream, accesses in self._accesses.items():
            if stream == own.stream:
                continue
            for other in accesses[done.get(stream, 0) :]:
                if other.start < own.stop and own.start < other.stop and (own.writes or other.writes):
                    self.races.append(Race(other, own))
        self._accesses[own.stream].append(own)


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def order_of(lines: Iterable[str], without: Container[int] = ()) -> Order:
    """Of a log's lines; `without` are the numbers of lines, and so waits, that are left out."""
    found = Order()
    for number, line in enumerate(lines):
        found.read(number, line, ignored=number in without)
    return found


def unneeded(lines: Sequence[str], first: int, last: int) -> list[Wait]:
    """Of the waits between two lines those without which everything would still be in order.

    Waits of a stream for the same other one, between which it is given nothing, are left out together."""
    together: dict[tuple[str, str, int], list[Wait]] = {}
    for wait in order_of(lines).waits:
        if first < wait.line < last:
            together.setdefault((wait.who, wait.whom, wait.given), []).append(wait)
    return [waits[0] for waits in together.values() if not order_of(lines, without={wait.line for wait in waits}).races]
