"""How long a device works at one thing after another: the GPU's own time, or a CPU's while it could work."""

from __future__ import annotations

import math
import time
from typing import Any, List, NamedTuple, Sequence

import torch

from megatron_ext.timeline.recorder import CoreWaits

LEAST = 10
"""Measurements for which the interval means something."""
_Z = 1.96
"""The quantile of the normal distribution for 95 %."""


class Median(NamedTuple):
    value: float
    spread: float
    """Half of the 95 % confidence interval; inf with less than `LEAST` measurements."""

    def tight(self, whole: float, relative: float, of_whole: float) -> bool:
        """Whether the spread is at most a part of the value, or a part of a whole in which it hardly counts."""
        return self.spread <= max(relative * self.value, of_whole * whole)


def median(values: Sequence[float]) -> Median:
    """Returns the median and its interval between two order statistics, whatever the distribution of the values.

    Conover 1999, section 3.2, in its normal approximation.
    """
    ordered, count = sorted(values), len(values)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    if count < LEAST:
        return Median(middle, math.inf)
    low = math.floor(count / 2 - _Z * math.sqrt(count) / 2)
    return Median(middle, (ordered[count - 1 - low] - ordered[low]) / 2)


class Lap(NamedTuple):
    ms: float
    waited_ms: float
    """What more passed, while other processes had the processor; always 0 on a GPU."""

    def shared(self, count: int) -> Lap:
        """The share of one of so many equal parts."""
        return Lap(self.ms / count, self.waited_ms / count)


class Marks:
    """Moments of a device's work, set by one thread.

    On a GPU they are of its stream, and nothing waits for them until `laps`. On a CPU the time in which the thread was
    ready but had no processor is told apart, so that a machine with other work gives the times of an idle one, as far
    as caches and clocks allow; what the thread waits for other ranks counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: List[Any] = []
        self._waits = CoreWaits()

    def set(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append((time.perf_counter(), self._waits.ns()))

    def laps(self) -> List[Lap]:
        """Returns the time from each mark to the next, and forgets the marks."""
        marks, self._marks = self._marks, []
        pairs = [(marks[number], marks[number + 1]) for number in range(len(marks) - 1)]
        if not self._cuda:
            return [_lap((after[0] - before[0]) * 1e3, (after[1] - before[1]) / 1e6) for before, after in pairs]
        torch.cuda.synchronize()
        return [Lap(before.elapsed_time(after), 0.0) for before, after in pairs]

    def close(self) -> None:
        self._waits.close()


def _lap(passed_ms: float, waited_ms: float) -> Lap:
    """The kernel counts a wait once it is over, so that one may fall into the lap after."""
    waited_ms = min(waited_ms, passed_ms)
    return Lap(passed_ms - waited_ms, waited_ms)
