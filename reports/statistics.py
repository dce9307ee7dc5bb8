"""Figures of a run's timeline: iteration lengths, compute share, bubble, time per stage.

Definitions, used on every page:

- The *length* of an iteration is from the earliest start to the latest end of its events, over all ranks.
- Its *period* is its length without what lies before the latest end of the iterations before: ranks that are done
  begin the next iteration while others are still at this one, and time that two iterations share counts once. It is
  not shorter than the longest that a rank is busy in it.
- A rank is *busy* while it computes: the sum of its `forward-compute` and `backward-compute` events. Where a schedule
  splits the backward pass, `backward-input-compute` and `backward-weight-compute` are backward computation.
- Its *bubble fraction* is 1 - busy / period. It counts all that is not forward or backward computation: waiting,
  communication that nothing hides, the optimizer.
- *All-reduce* is `grads-all-reduce`, `layernorm-grads-all-reduce` and `embedding-grads-all-reduce`.
- An iteration is *complete* when every rank that has events in any has at least as many in this one as in the
  median of those where it has some, and *steady* when it is complete and not the first that has events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.events import Timeline

FORWARD = ("forward-compute",)
BACKWARD = ("backward-compute", "backward-input-compute", "backward-weight-compute")
COMPUTE = FORWARD + BACKWARD
WAIT = (
    "forward-recv",
    "backward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "forward-send-forward-recv",
    "backward-send-backward-recv",
)
"""Also what sends and then waits to receive, as Megatron-LM does in one call."""
SEND = ("forward-send", "backward-send")
ALL_REDUCE = ("grads-all-reduce", "layernorm-grads-all-reduce", "embedding-grads-all-reduce")
OPTIMIZER = ("optimizer",)
"""Without `optimizer-clip-main-grad`, which lies inside it."""


@dataclass(frozen=True)
class Statistics:
    """Per iteration, and per rank and iteration."""

    names: tuple[str, ...]
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
    total_ns: NDArray[np.float64]
    """(ranks, names, n) summed duration of the events of a name."""

    def sum_ms(self, names: Sequence[str]) -> NDArray[np.float64]:
        """(ranks, n) summed duration of the events of these names, ms."""
        wanted = [index for index, name in enumerate(self.names) if name in names]
        return np.asarray(self.total_ns[:, wanted].sum(axis=1) / 1e6)

    @property
    def compute_share(self) -> NDArray[np.float64]:
        """(ranks, n) busy / period; NaN where the rank has no event."""
        period_ms = np.maximum(self.period_ns, 1) / 1e6
        return np.where(self.events > 0, self.sum_ms(COMPUTE) / period_ms, np.nan)

    @property
    def usual_period_ms(self) -> float | None:
        """Median over steady iterations; None without any."""
        return float(np.median(self.period_ns[self.steady])) / 1e6 if self.steady.any() else None

    @property
    def middle(self) -> int | None:
        """Index of the steady iteration of median length; without any, of the last iteration."""
        steady = np.flatnonzero(self.steady)
        if len(steady):
            return int(steady[np.argsort(self.length_ns[steady], kind="stable")[(len(steady) - 1) // 2]])
        return len(self.iterations) - 1 if len(self.iterations) else None

    @property
    def bubble(self) -> float | None:
        """Mean bubble fraction of the ranks that have events, each the median over steady iterations."""
        shares = self.compute_share[self.events.any(axis=1)][:, self.steady]
        return float(1 - np.median(shares, axis=1).mean()) if shares.size else None


def statistics(timeline: Timeline, ranks: int) -> Statistics:
    """Sums up the events of a run of `ranks` ranks."""
    events, names = timeline.events, len(timeline.names)
    numbers, index = np.unique(events["iteration"], return_inverse=True)
    n = len(numbers)
    start = np.full(n, np.iinfo(np.int64).max)
    end = np.full(n, np.iinfo(np.int64).min)
    np.minimum.at(start, index, events["start_ns"])
    np.maximum.at(end, index, events["end_ns"])
    rank = events["rank"].astype(np.int64)
    count = np.bincount(rank * n + index, minlength=ranks * n).reshape(ranks, n)
    cell = (rank * names + events["name"]) * n + index
    duration = events["end_ns"] - events["start_ns"]
    total = np.bincount(cell, weights=duration, minlength=ranks * names * n).reshape(ranks, names, n)
    compute = [index for index, name in enumerate(timeline.names) if name in COMPUTE]
    busiest = total[:, compute].sum(axis=1).max(axis=0, initial=0).astype(np.int64)
    return Statistics(
        names=timeline.names,
        iterations=numbers.astype(np.int64),
        start_ns=start,
        length_ns=end - start,
        period_ns=np.maximum(end - _not_before(start, end), busiest),
        steady=_complete(count) & (np.arange(n) > 0),
        events=count.astype(np.int64),
        total_ns=total.astype(np.float64),
    )


def _not_before(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) the start of each iteration, or the latest end of those before it where that is later."""
    begins = start.copy()
    begins[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    return begins


def slowest_first(figures: Statistics, replica_of: Sequence[int]) -> list[int]:
    """The replicas, first the one with the rank that computes longest in an iteration (median over steady ones).

    Args:
        replica_of: the data-parallel index of each rank.
    """
    busy = figures.sum_ms(COMPUTE)[:, figures.steady] if figures.steady.any() else figures.sum_ms(COMPUTE)
    usual = np.median(busy, axis=1) if busy.shape[1] else np.zeros(len(busy))
    longest = {replica: max(usual[np.array(replica_of) == replica]) for replica in sorted(set(replica_of))}
    return sorted(longest, key=lambda replica: -longest[replica])


def _complete(count: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) from the number of events per rank and iteration, (ranks, n)."""
    present = count[count.any(axis=1)]
    if present.size == 0:
        return np.zeros(count.shape[1], bool)
    # The larger middle: of two unequal iterations the shorter one is the one that was cut.
    usual = np.array([np.sort(row[row > 0])[np.count_nonzero(row) // 2] for row in present])
    return np.asarray((present >= usual[:, None]).all(axis=0))


@dataclass(frozen=True)
class IdealBubble:
    """Bubble fraction of a schedule whose stages take equally long and whose messages take no time."""

    schedule: str
    formula: str
    """Of p stages, v chunks on each, m micro-batches."""
    idle: int
    length: int
    """Of an iteration, in the unit of `idle`."""

    @property
    def fraction(self) -> float:
        return self.idle / self.length


def ideal_bubble(schedule: str, stages: int, chunks: int, micro_batches: int) -> IdealBubble | None:
    """The ideal of a schedule; None where no formula is known to hold.

    GPipe and 1F1B: a stage idles for p-1 of m+p-1 pairs of a forward and a backward pass (Narayanan et al. 2021,
    section 2.2, which gives the ratio to the computing time, (p-1)/m). Interleaved: the same of m*v+p-1 pairs
    of a chunk (section 2.2.2), if p divides m. ZB-H1: it idles (p-1) * (F + B - W), where F is a forward pass, B
    and W are the parts of a backward pass for inputs and weights, and computes m * (F + B + W) (Qi et al. 2023,
    section 2); with F = B = W, as there, p-1 of 3m+p-1. It takes m >= p, or there are too few W to fill the waits.
    """
    p, v, m = stages, chunks, micro_batches
    if schedule in ("gpipe", "one_f_one_b"):
        return IdealBubble("GPipe" if schedule == "gpipe" else "1F1B", "(p−1)/(m+p−1)", p - 1, m + p - 1)
    if schedule == "interleaved" and m % p == 0:
        return IdealBubble("interleaved 1F1B", "(p−1)/(m·v+p−1)", p - 1, m * v + p - 1)
    if schedule == "zb_h1" and m >= p:
        return IdealBubble("ZB-H1", "(p−1)/(3m+p−1)", p - 1, 3 * m + p - 1)
    return None


@dataclass(frozen=True)
class StageTimes:
    """Medians over the ranks of a stage and the steady iterations; ms per iteration, shares of its period."""

    stage: int
    forward_ms: float
    backward_ms: float
    wait_ms: float
    send_ms: float
    all_reduce_ms: float
    optimizer_ms: float
    bubble: float


def stage_times(figures: Statistics, stage_of: Sequence[int]) -> list[StageTimes]:
    """One row per stage that has events in a steady iteration.

    Args:
        stage_of: the stage of each rank.
    """
    rows = []
    for stage in sorted(set(stage_of)):
        ranks = [rank for rank, of in enumerate(stage_of) if of == stage and figures.events[rank].any()]

        def median(values: NDArray[np.float64], ranks: list[int] = ranks) -> float:
            return float(np.median(values[ranks][:, figures.steady]))

        if ranks and figures.steady.any():
            rows.append(
                StageTimes(
                    stage=stage,
                    forward_ms=median(figures.sum_ms(FORWARD)),
                    backward_ms=median(figures.sum_ms(BACKWARD)),
                    wait_ms=median(figures.sum_ms(WAIT)),
                    send_ms=median(figures.sum_ms(SEND)),
                    all_reduce_ms=median(figures.sum_ms(ALL_REDUCE)),
                    optimizer_ms=median(figures.sum_ms(OPTIMIZER)),
                    bubble=1 - median(figures.compute_share),
                )
            )
    return rows
