"""Figures of a run's timeline: lengths of iterations, and shares of what the ranks spend in them.

Definitions, used on every page; reports/facts/breakdown.py has those of the parts of an iteration:

- The *length* of an iteration is from the earliest start to the latest end of its events, over all ranks.
- Its *period* is its length without what lies before the latest end of the iterations before: ranks that are done
  begin the next iteration while others are still at this one, and time that two iterations share counts once. It is
  not shorter than the longest that a rank computes in it.
- The *bubble* of a rank, as a fraction, is bubble / (passes + bubble), the passes whole: so it compares with the
  formulas for schedules, which know of passes and waits alone. The rest of an iteration stands apart.
- Without a flush a rank always has a next micro-batch, so that all its *idle* time is bubble: its waits, and the time
  in which it records nothing. An iteration of a rank then begins when the rank is done with the one before, but not
  before another rank begins it.
- An iteration is *complete* when every rank that has events in any has at least as many in this one as in the
  median of those where it has some, and *steady* when it is complete and not the first that has events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from conf.run_folder.iteration_time import IterationTime, LineTime, iteration_time
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.schedules import SCHEDULES, Bubble
from reports.facts.breakdown import Spent, spent, waiting_ns
from reports.readers.events import Timeline
from reports.readers.record import Record

Floats = NDArray[np.float64]


def time_of(record: Record) -> IterationTime | None:
    """What pages show as a run's iteration time; None before the first line of its log."""
    return iteration_time(_lines(record))


def _lines(record: Record) -> Iterator[LineTime]:
    metrics = record.metrics
    if "elapsed_ms" not in metrics:
        return
    samples = metrics.get("consumed_samples", [None] * len(metrics))
    for iteration, elapsed_ms, consumed in zip(metrics["iteration"], metrics["elapsed_ms"], samples, strict=True):
        if not pd.isna(elapsed_ms):
            yield LineTime(
                iteration=int(iteration),
                elapsed_ms=float(elapsed_ms),
                consumed_samples=None if consumed is None or pd.isna(consumed) else int(consumed),
            )


def batches(record: Record, iterations: NDArray[np.int64]) -> Floats:
    """(n,) samples of each of these iterations of a run whose batch changes; else 1, since times are then compared per
    iteration."""
    if record.decisions:
        after = np.array([one.iteration for one in record.decisions])
        sizes = np.array([record.decisions[0].before, *(one.global_batch_size for one in record.decisions)], np.float64)
        found = sizes[np.searchsorted(after, iterations, side="left")]
    elif (known := time_of(record)) is not None and known.per_sample:
        consumed = record.known("consumed_samples").astype("float64")
        logged = consumed.index.to_numpy("int64")
        each = np.diff(consumed.to_numpy()) / np.diff(logged)
        each = np.concatenate([each[:1], each])  # the first does not tell of a run that began at another's checkpoint
        found = each[np.minimum(np.searchsorted(logged, iterations, side="left"), len(each) - 1)]
    else:
        found = np.ones(len(iterations))
    return found if len(set(found.tolist())) > 1 else np.ones(len(iterations))


def usual_first(
    record: Record | None, iterations: NDArray[np.int64], lasts_ms: Floats, samples: Floats
) -> NDArray[np.int64]:
    """(n,) which of these iterations to look at first to understand the run: those nearest to the median of its log.

    An iteration must be near the median by its events as well as by its line of the log, which may be the mean of
    several iterations. Where the batch changes, times are per sample, and iterations of the most frequent batch come
    first.

    Args:
        lasts_ms: (n,) of each by its events, from the end of the iteration before to its own.
        samples: (n,) `batches`.
        record: None where no log is known.
    """
    if not len(iterations):
        return np.zeros(0, np.int64)
    by_events = lasts_ms / samples
    middle, far = float(np.median(by_events)), np.zeros(len(iterations))
    known = None if record is None else time_of(record)
    if record is not None and known is not None and known.per_sample == bool((samples != 1).any()):
        # What lines count and events do not must not make a long iteration usual.
        middle = float(np.clip(known.ms, *np.quantile(by_events, [0.25, 0.75])))
        far = _off(_of_lines(record, known, iterations), known.ms)
    off = _off(by_events, middle)
    far = np.maximum(off, np.nan_to_num(far, nan=np.inf))
    sizes, counts = np.unique(samples, return_counts=True)
    other = samples != sizes[int(counts.argmax())]
    return np.lexsort((off, far, other)).astype(np.int64)


def _off(values: Floats, middle: float) -> Floats:
    """(n,) how far each is from the middle, as a share of it."""
    return np.abs(values - middle) / middle if middle > 0 else np.abs(values)


def _of_lines(record: Record, time: IterationTime, iterations: NDArray[np.int64]) -> Floats:
    """(n,) ms of the line that each is in, per iteration or sample; NaN where there is none that counts."""
    logged = record.known("elapsed_ms").index.to_numpy("int64")
    each = np.concatenate([np.full(len(logged) - len(time.each_ms), np.nan), time.each_ms, [np.nan]])
    return np.asarray(each[np.searchsorted(logged, iterations, side="left")], np.float64)


SLOW_RANK = 1.05
"""Times the compute time of others of its stage, from which a rank differs from them."""


@dataclass(frozen=True)
class Statistics:
    """Per iteration, and per rank and iteration."""

    iterations: NDArray[np.int64]
    """(n,) numbers of the iterations that have events, ascending."""
    start_ns: NDArray[np.int64]
    """(n,) earliest start."""
    length_ns: NDArray[np.int64]
    """(n,)."""
    period_ns: NDArray[np.int64]
    """(n,)."""
    steady: NDArray[np.bool_]
    """(n,)."""
    events: NDArray[np.int64]
    """(ranks, n) number of events."""
    waiting_ns: NDArray[np.int64]
    """(events,) the part of each event that is waiting, or UNKNOWN (reports/facts/breakdown.py)."""
    spent: Spent
    samples: NDArray[np.float64]
    """(n,) samples by which times of iterations are compared where the batch changes; else 1 (`batches`)."""
    usual: NDArray[np.int64]
    """Indices of the steady iterations, the most usual first: those nearest to the median of the run's log."""

    @property
    def compute_share(self) -> NDArray[np.float64]:
        """(ranks, n) compute / period; NaN where the rank has no event."""
        return self._of_events(self.spent.compute / self._period_ms)

    @property
    def communication_share(self) -> NDArray[np.float64]:
        """(ranks, n) exposed communication / period, at most 1; NaN where the rank has no event."""
        return self._of_events(np.minimum(self.spent.communication / self._period_ms, 1.0))

    @property
    def bubble_share(self) -> NDArray[np.float64]:
        """(ranks, n) bubble / (passes + bubble), 0 without either; NaN where the rank has no event."""
        together = self.spent.passes + self.spent.bubble
        return self._of_events(self.spent.bubble / np.where(together > 0, together, 1.0))

    @property
    def _period_ms(self) -> NDArray[np.float64]:
        return np.asarray(np.maximum(self.period_ns, 1) / 1e6)

    def _of_events(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(self.events > 0, values, np.nan)

    @property
    def usual_period_ms(self) -> float | None:
        """Median over `alike`; None without any."""
        return float(np.median(self.period_ns[self.alike])) / 1e6 if len(self.usual) else None

    @property
    def alike(self) -> NDArray[np.bool_]:
        """(n,) which iterations are steady and, where the batch changes, have that of the most usual one."""
        return self.steady & (self.samples == self.samples[self.usual[0]]) if len(self.usual) else self.steady

    @property
    def gap_ns(self) -> NDArray[np.int64]:
        """(n,) what passes before an iteration, from the latest end of those before to its first event."""
        ends = np.maximum.accumulate(self.start_ns + self.length_ns)
        return np.asarray(np.maximum(self.start_ns - np.concatenate([self.start_ns[:1], ends[:-1]]), 0))

    @property
    def middle(self) -> int | None:
        """Index of the most usual iteration, which pages show and explain; without a steady one, of the last."""
        if len(self.usual):
            return int(self.usual[0])
        return len(self.iterations) - 1 if len(self.iterations) else None

    def bubble_of(self, ranks: Sequence[int]) -> float:
        """The median over these ranks and the steady iterations."""
        return float(np.median(self.bubble_share[ranks][:, self.steady]))

    @property
    def bubble(self) -> float | None:
        """Mean over the ranks that have events, of each the median over steady iterations."""
        return self._mean(self.bubble_share)

    @property
    def communication(self) -> float | None:
        """Exposed, as a share of the period; likewise."""
        return self._mean(self.communication_share)

    def _mean(self, shares: NDArray[np.float64]) -> float | None:
        known = shares[self.events.any(axis=1)][:, self.steady]
        return float(np.median(known, axis=1).mean()) if known.size else None


def statistics(timeline: Timeline, ranks: Sequence[Place], record: Record | None = None) -> Statistics:
    """Sums up the events of a run of these ranks. `record`: has the log, by which iterations are usual, and the plan,
    which says whether micro-batches stream without a flush; None: by the events alone, with a flush."""
    events = timeline.events
    spans = events.groupby("iteration").agg(start=("start_ns", "min"), end=("end_ns", "max"))
    numbers, start, end, n = spans.index.to_numpy(), spans["start"].to_numpy(), spans["end"].to_numpy(), len(spans)
    cell = events["rank"].to_numpy(np.int64) * n + spans.index.get_indexer(events["iteration"])
    count = np.bincount(cell, minlength=len(ranks) * n).reshape(len(ranks), n)
    streams = record is not None and record.plan.stream is not None
    waits = waiting_ns(timeline, ranks, streams, () if record is None else record.plan.islands or ())
    parts = spent(timeline, ranks, np.maximum(waits, 0), cell, (len(ranks), n))
    if streams:
        blank = np.bincount(cell, weights=_blank_ns(events, start[cell % max(n, 1)]), minlength=parts.bubble.size)
        parts = replace(parts, bubble=parts.bubble + blank.reshape(parts.bubble.shape) / 1e6)
    begins = start.copy()  # or the latest end of the iterations before, where that is later
    begins[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    busiest = (1e6 * parts.compute.max(axis=0, initial=0)).astype(np.int64)
    steady = _complete(count) & (np.arange(n) > 0)
    samples = np.ones(n) if record is None else batches(record, numbers)
    lasts_ms = np.diff(np.maximum.accumulate(end), prepend=start[:1]) / 1e6
    kept = np.flatnonzero(steady)
    return Statistics(
        iterations=numbers,
        start_ns=start,
        length_ns=end - start,
        period_ns=np.maximum(end - begins, busiest),
        steady=steady,
        events=count.astype(np.int64),
        waiting_ns=waits,
        spent=parts,
        samples=samples,
        usual=kept[usual_first(record, numbers[kept], lasts_ms[kept], samples[kept])],
    )


def _blank_ns(events: pd.DataFrame, begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """(events,) how long, before each, its rank had no event. `begins` (events,): when the first rank began its
    iteration; what lies before is none of it."""
    rank, since = events["rank"].to_numpy(), begins.copy()
    follows = np.flatnonzero(np.diff(rank) == 0) + 1
    since[follows] = np.maximum(begins[follows], events.groupby("rank")["end_ns"].cummax().to_numpy()[follows - 1])
    return np.asarray(np.maximum(events["start_ns"].to_numpy() - since, 0))


def _complete(count: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) from the number of events per rank and iteration, (ranks, n)."""
    present = count[count.any(axis=1)]
    if present.size == 0:
        return np.zeros(count.shape[1], bool)
    # The larger middle: of two unequal iterations the shorter one is the one that was cut.
    usual = np.array([np.sort(row[row > 0])[np.count_nonzero(row) // 2] for row in present])
    return np.asarray((present >= usual[:, None]).all(axis=0))


def ideal_bubble(schedule: str, stages: int, chunks: int, micro_batches: int) -> Bubble | None:
    """Return the bubble of a schedule whose stages take equally long and whose messages take no time; None where no
    formula is known."""
    one = SCHEDULES.get(schedule)
    return None if one is None else one.bubble(stages, chunks, micro_batches)
