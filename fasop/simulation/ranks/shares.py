"""The shares of the replicas of a plan with which an iteration takes least, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fasop.costs.parallelism import Parallelism
from fasop.simulation.iteration import Durations, replay
from fasop.simulation.loaded import PartitionedPipelines
from fasop.simulation.ranks.replay import as_arrays
from fasop.simulation.vectorised import Traffic
from megatron_ext.contract.parallel_config import Schedule
from megatron_ext.contract.schedule.iteration import as_json, schedule

CLOSE = 1e-9
"""A part of an iteration that nobody could measure."""


class Shared(NamedTuple):
    """A division of the micro-batches of an iteration."""

    counts: tuple[int, ...]
    """Micro-batches of each replica."""
    seconds: float
    """Seconds of the iteration."""


class Replica:
    """Replicas that take the same: how long an iteration lasts, by the number of micro-batches that each takes."""

    def __init__(self, name: str, chunks: int, durations: Durations) -> None:
        self._name, self._chunks, self._durations = name, chunks, durations
        self._alone = len(durations.times) == 1 and chunks == 1
        self._known: dict[int, float] = {}

    def seconds(self, count: int) -> float:
        """Return the seconds of an iteration, if no replica were slower than one of these."""
        if count not in self._known:
            if self._alone and count > 2:  # one stage waits for nobody: each micro-batch takes the same
                return self.seconds(2) + (count - 2) * (self.seconds(2) - self.seconds(1))
            self._known[count] = self._iteration(count)
        return self._known[count]

    def _iteration(self, count: int) -> float:
        if not self._durations.blocking:
            return float(replace(self._pipeline, micro_batches=count).iteration()[0])
        lists = schedule(self._name, len(self._durations.times), self._chunks, count)
        return replay(as_json(lists, self._chunks, count), self._durations)[0]

    @cached_property
    def _pipeline(self) -> PartitionedPipelines:
        """The one pipeline of the stages, with a micro-batch."""
        one, stages = self._durations, len(self._durations.times)
        forward, backward = (
            np.array([[times.sends(kind)[1]] for times in one.times]) for kind in ("forward-send", "backward-send")
        )
        one_way_out = np.array([times.one_way_out or stages == 2 for times in one.times])
        return PartitionedPipelines(
            schedule=Schedule(self._name),
            micro_batches=1,
            blocking=False,
            times=as_arrays(one.times, one.optimizer),
            traffic=Traffic(forward, backward, one_way_out),
            exposed=np.array([one.gradients]).T,
            embedding=np.array([one.embedding if stages > 1 else 0.0]),
        )


def replicas_of(parallel: Parallelism, every: Sequence[Durations]) -> list[Replica]:
    """The replicas of a plan, by what each takes; those with the same object are the same."""
    kinds: dict[int, Replica] = {}
    return [kinds.setdefault(id(of), Replica(str(parallel.schedule), parallel.chunks, of)) for of in every]


def best_shares(replicas: Sequence[Replica], micro_batches: int) -> Shared:
    """The division of so many micro-batches, no fewer than replicas, that takes least; every replica has one at least.

    What replicas do together begins when the last of them is there, so an iteration takes the longest of the times that
    the replicas would make it take alone. None of these falls where a replica has more to do, so the least longest time
    is found by bisection, and no division takes less by more than `CLOSE` of it.
    """
    kinds = [*dict.fromkeys(replicas)]
    number = [sum(replica is kind for replica in replicas) for kind in kinds]

    def most(kind: Replica, limit: float) -> int:
        """Micro-batches within the limit."""
        return _last(lambda count: kind.seconds(count) <= limit, micro_batches)

    def enough(limit: float) -> bool:
        counts = [most(kind, limit) for kind in kinds]
        return min(counts) > 0 and sum(a * b for a, b in zip(counts, number, strict=True)) >= micro_batches

    low, high = 0.0, max(kind.seconds(-(-micro_batches // len(replicas))) for kind in kinds)
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    within = {kind: most(kind, high) for kind in kinds}
    counts = [within[replica] for replica in replicas]
    for _ in range(sum(counts) - micro_batches):  # more than there are fit: those that take longest have one less
        last = max(
            (place for place, count in enumerate(counts) if count > 1),
            key=lambda place: (replicas[place].seconds(counts[place]), place),
        )
        counts[last] -= 1
    seconds = max(replica.seconds(count) for replica, count in zip(replicas, counts, strict=True))
    return Shared(tuple(counts), seconds)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` of which something holds that holds of all smaller ones; 0 if of none."""
    good, bad = 0, 1
    while bad <= most and holds(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
