"""How long an iteration takes: the one figure that every page, table and command shows for a run.

It is the median over the lines of the log; of a very long log over the last MOST_LINES. A line has the mean of the
iterations since the line before, without evaluations. The first line has the start-up in it and does not count, unless
it is the only one. Where the batch changes during the run, times are per sample, so that iterations with a larger batch
do not count as slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_LINES = 100_000
SIGMA = (0.1587, 0.8413)
"""The quantiles one standard deviation below and above the median of a normal distribution."""


@dataclass(frozen=True)
class LineTime:
    """What a line of the log says of time."""

    iteration: int
    elapsed_ms: float
    """The mean per iteration since the line before."""
    consumed_samples: int | None = None
    """Up to and with this iteration."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of some values, and how far they lie around it."""

    median: float
    half: float
    """Half the distance between the quantiles SIGMA: of normally distributed values their standard deviation. NaN for
    fewer than two values."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value. Raises ValueError for none."""
        if not values:
            raise ValueError("there are no values")
        ordered = sorted(values)
        low, high = (_quantile(ordered, share) for share in SIGMA)
        half = (high - low) / 2 if len(ordered) > 1 else math.nan
        return cls(median=statistics.median(ordered), half=half, count=len(ordered))

    def doubt(self, text: Callable[[float], str]) -> str:
        """What stands behind the median: `± 3.1 (n = 49)`; `text` writes a number."""
        half = "" if math.isnan(self.half) else f"± {text(self.half)} "
        return f"{half}(n = {self.count:,})"


def within_spread(a: Spread, b: Spread) -> bool:
    """Whether two medians are no further apart than the values vary, so that neither is known to be better."""
    return not abs(a.median - b.median) > a.half + b.half  # nor where nobody knows how far they vary


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolates at Weibull's positions, which make no spread of few values too small: of up to five it is their
    whole range."""
    at = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The iteration time of a run that has logged something."""

    each_ms: tuple[float, ...]
    """The time of each line that counts, by iteration; at least one."""
    per_sample: bool
    """Whether they are milliseconds per sample, because the batch changed; else they are per iteration."""
    alone: bool
    """Whether the only line counts, which has the start-up in it."""

    @property
    def ms(self) -> float:
        return statistics.median(self.each_ms)

    @property
    def spread(self) -> Spread:
        return Spread.of(self.each_ms)

    @property
    def unit(self) -> str:
        return "per sample" if self.per_sample else "per iteration"

    @property
    def figure(self) -> str:
        """The milliseconds, as pages and tables show them."""
        return self.text(self.ms)

    def text(self, ms: float) -> str:
        """Other milliseconds in the same form."""
        return f"{ms:,.4g}" if self.per_sample else f"{ms:,.1f}"

    @property
    def cell(self) -> str:
        """The same for a column of iterations."""
        return f"{self.figure}/sample" if self.per_sample else self.figure

    @property
    def basis(self) -> str:
        """What the median is of, in words."""
        if self.alone:
            return "the only log line, with the start-up in it"
        count = len(self.each_ms)
        return f"median of {count:,} log lines after the first" if count > 1 else "the log line after the first"


def iteration_time(lines: Iterable[LineTime]) -> IterationTime | None:
    """The time from a run's lines in the order of the log; None without any. Of an iteration that was run twice the
    later line counts."""
    known = {line.iteration: line for line in lines}
    ordered = [known[iteration] for iteration in sorted(known)]
    counted = (ordered[1:] or ordered)[-MOST_LINES:]
    if not counted:
        return None
    batches = list(_batches(ordered[-MOST_LINES - 1 :]))
    known_batches = [batch for batch in batches if batch is not None]
    per_sample = len(known_batches) == len(batches) > 0 and len(set(known_batches)) > 1
    if per_sample:
        each = [line.elapsed_ms / batch for line, batch in zip(counted, known_batches, strict=True)]
    else:
        each = [line.elapsed_ms for line in counted]
    return IterationTime(each_ms=tuple(each), per_sample=per_sample, alone=len(ordered) == 1)


def _batches(lines: Sequence[LineTime]) -> Iterator[float | None]:
    """Samples of an iteration, of each line after the first; None where the log does not tell."""
    for before, line in pairwise(lines):
        if before.consumed_samples is None or line.consumed_samples is None:
            yield None
        else:
            batch = (line.consumed_samples - before.consumed_samples) / (line.iteration - before.iteration)
            yield batch if batch > 0 else None


class Spent:
    """Adds up iterations and evaluations, line by line."""

    def __init__(self, log_interval: int) -> None:
        """A run that goes on from another one's checkpoint begins with a later iteration than the first; its first line
        is of at most `log_interval` iterations."""
        self._log_interval = log_interval
        self._iteration: int | None = None
        self.hours = 0.0

    def add(self, iteration: int, elapsed_ms: float, evaluation_s: float) -> float:
        """Hours up to a line. `elapsed_ms`: mean of the iterations since the line before. `evaluation_s`: of the
        evaluation after them; 0 without one."""
        first = (iteration - 1) % self._log_interval + 1
        count = first if self._iteration is None else iteration - self._iteration
        self._iteration = iteration
        self.hours += (count * elapsed_ms / 1e3 + evaluation_s) / 3600
        return self.hours
