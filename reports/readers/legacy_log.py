"""Takes the blocks of timers out of a log of Megatron-LM whose timers tell of every rank (`--timing-log-option all`).

The Megatron-LM that the FASOP authors modified adds when each call began and ended
(https://github.com/AvatarHwang/FASOP, `Megatron-LM-2/megatron/timers.py`). After an iteration's line:

    times across ranks (ms):
      forward-compute:
         rank  0: 957.35
     forward-compute start time lst:  1686726492.25 1686726492.53 …
     forward-compute end time lst:  1686726492.31 1686726492.60 …

It is printed at once but is long, so that lines of other ranks of the node can land inside one of its lines. A line
that was cut so is put together again; what cannot be is left out, with a note.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from conf.run_folder.log_lines import progress
from reports.readers.upstream_log import Lines

HEAD = "times across ranks (ms):"
_TIMER = re.compile(r"  (\S+):")
_START = re.compile(r" (\S+) start time lst: ")
_RANK = re.compile(r" {5}rank +(\d{1,6}): (\d+\.\d\d)")
_TIMES = r"(?: \d{10}\.\d{1,7})+"
"""Seconds since 1970 as Python prints them; only asked of what was put together."""
_BODY = " .0123456789"


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The calls of one timer on one rank since the log line before; their times are `count` values from `at` on."""

    block: int
    """Index into `spent`."""
    iteration: int
    """That of the log line, the last that the block covers."""
    rank: int
    name: str
    at: int
    count: int
    line: int
    """The line of the file where the block says so."""


@dataclass(kw_only=True)
class Blocks:
    """What the blocks of a log say. `rest` fills it."""

    calls: list[Calls] = field(default_factory=list)
    starts: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since 1970, of one element of `calls` after the other."""
    ends: array[float] = field(default_factory=lambda: array("d"))
    spent: list[dict[str, list[float]]] = field(default_factory=list)
    """Milliseconds per iteration of each rank that has any, by block and timer."""
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    """Read so far."""

    def rest(self, lines: Iterable[str]) -> Iterator[str]:
        """Reads the lines of a log and yields, without their ends, those that belong to no block.

        A last line that has no end is still being written, and is left out.
        """
        source = Lines(lines)
        iteration: int | None = None
        block: _Block | None = None
        for line in source:
            self.lines = source.number
            if (reached := progress(line)) is not None:
                iteration, block = reached[0], None
            elif line == HEAD:
                if iteration is not None:
                    self.spent.append({})
                    block, iteration = _Block(self, source, iteration), None
                    continue
                block = None  # of the set-up, or of a checkpoint that was saved
            elif block is None and line == "  forward-compute:":
                self.notes.append(f"line {source.number}: times without an iteration line before them; left out")
            if (block is None or not block.take(line)) and not source.at_cut:
                yield line


class _Block:
    """The block that is being read: after a timer's name come its ranks, each with a list of starts and one of ends."""

    def __init__(self, blocks: Blocks, source: Lines, iteration: int) -> None:
        self._blocks = blocks
        self._source = source
        self._iteration = iteration
        self._number = len(blocks.spent) - 1
        self._timer: str | None = None
        self._last = -1
        """Rank of the last line; of a timer they come in ascending order."""
        self._spent = 0.0
        self._rank: int | None = None
        """That whose lists are awaited."""
        self._starts: list[float] | None = None

    def take(self, line: str) -> bool:
        """Whether the line belongs to the block."""
        if self._rank is not None and self._list(line, self._rank):
            return True
        if (timer := _TIMER.fullmatch(line)) is not None:
            self._timer, self._last, self._rank, self._starts = timer[1], -1, None, None
            return True
        whole = None if self._source.at_cut else _RANK.fullmatch(line)
        whole = whole or self._source.mend(line, "     rank ", f"{_BODY}:", _RANK)
        if whole is None:
            return False
        if self._starts is not None:
            self._blocks.notes.append(f"{self._where}: the end times are missing; left out")
        rank = int(whole[1])
        if rank <= self._last:  # the line with the timer's name was lost; its lists will tell
            self._timer = None
        self._rank, self._last, self._starts, self._spent = rank, rank, None, float(whole[2])
        if self._timer is not None:
            self._blocks.spent[-1].setdefault(self._timer, []).append(self._spent)
        return True

    def _list(self, line: str, rank: int) -> bool:
        """Whether the line is the list that is awaited."""
        if self._starts is None and (named := _START.match(line)) is not None and named[1] != self._timer:
            if self._timer is not None:
                self._blocks.spent[-1][self._timer].pop()
            self._blocks.spent[-1].setdefault(named[1], []).append(self._spent)
            self._timer = named[1]
        if self._timer is None:
            return False
        kind = "start" if self._starts is None else "end"
        literal = f" {self._timer} {kind} time lst: "
        times = self._times(line, literal)
        if times is not None:
            self._listed(rank, times)
            return True
        if line.startswith(literal):
            self._blocks.notes.append(f"{self._where}: the {kind} times are damaged; left out")
            self._rank = self._starts = None
            return True
        return False

    @property
    def _where(self) -> str:
        return f"rank {self._rank}, {self._timer} up to iteration {self._iteration} (line {self._source.number})"

    def _listed(self, rank: int, times: list[float]) -> None:
        if self._starts is None:
            self._starts = times
            return
        blocks, starts = self._blocks, self._starts
        if len(starts) != len(times):
            blocks.notes.append(f"{self._where}: {len(starts)} starts but {len(times)} ends; left out")
        else:
            blocks.calls.append(
                Calls(
                    block=self._number,
                    iteration=self._iteration,
                    rank=rank,
                    name=str(self._timer),
                    at=len(blocks.starts),
                    count=len(starts),
                    line=self._source.number,
                )
            )
            blocks.starts.extend(starts)
            blocks.ends.extend(times)
        self._rank, self._starts = None, None

    def _times(self, line: str, literal: str) -> list[float] | None:
        """The times of a list; of one that was cut, with its other part. None if there is no list of that kind."""
        following = self._source.peek(0)
        goes_on = following is not None and not following.lstrip(_BODY)
        if line.startswith(literal) and not goes_on and not self._source.at_cut:
            times = _floats(line[len(literal) :])
            if times is not None:
                return times
        pattern = re.compile(re.escape(literal) + _TIMES)
        whole = self._source.mend(line, literal, _BODY, pattern, lambda match: _ascending(match[0][len(literal) :]))
        if whole is None and not self._source.at_cut:
            whole = pattern.fullmatch(line)
        return None if whole is None else _floats(whole[0][len(literal) :])


def _ascending(text: str) -> bool:
    times = _floats(text) or []
    return all(before <= after for before, after in pairwise(times))


def _floats(text: str) -> list[float] | None:
    try:
        return list(map(float, text.split()))
    except ValueError:
        return None
