"""What a set of nodes does with a batch, from the times of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import TypeAlias

from fasop.trainings.replica_times import ReplicaTimes, Taken, halves_of
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.iteration import SampleDivision

_Shared: TypeAlias = tuple[ReplicaTimes, tuple[int, int], int]
"""A replica with its even and odd micro-batches and its streams."""


class ReplicaNodes:
    """Replicas on their nodes."""

    def __init__(
        self,
        replicas: Callable[[int, bool], Sequence[ReplicaTimes]],
        weights: Sequence[int],
        streams: Sequence[int],
        ways: Sequence[Mapping[int, Sequence[int]]] | None = None,
        *,
        pipelined: bool = False,
    ) -> None:
        """`replicas` are their times by the size of micro-batches, and whether any of them has several streams.
        `weights` are the micro-batches of each in its first batch. `ways` are the sizes that its micro-batches may
        have, each with its numbers of streams; None: what the plan says alone."""
        self.weights, self.ways, self.streams, self.pipelined = weights, ways, streams, pipelined
        self._replicas = cache(replicas)
        self._known: dict[tuple[SampleDivision, bool], float] = {}
        self._timed: dict[tuple[SampleDivision, int, bool], Times] = {}

    def seconds(self, division: SampleDivision, measures: bool = False) -> float:
        key = division, measures
        if key not in self._known:
            self._known[key] = max(taken.whole for taken in self._unlike(division, measures).values())
        return self._known[key]

    def times(self, division: SampleDivision, iterations: int, measures: bool) -> Times:
        """Return the times as the stopwatches of a run's ranks show them: medians over the iterations."""
        key = division, min(iterations, 3), measures
        if key not in self._timed:
            self._timed[key] = self._times(*key)
        return self._timed[key]

    def _times(self, division: SampleDivision, iterations: int, measures: bool) -> Times:
        every = self._taken(division, False)
        whole = self.seconds(division)
        if measures and iterations < 3:  # of three or more, one that measures is the longest
            measured, part = self._taken(division, True), 1.0 / iterations
            every = [_between(*both, part) for both in zip(every, measured, strict=True)]
            whole += part * (self.seconds(division, measures=True) - whole)
        work = [max(taken.work) for taken in every]
        passes = [max(taken.passes) for taken in every]
        return Times(
            [seconds / count for seconds, count in zip(work, division.shares, strict=True)],
            whole,
            [both - own for both, own in zip(passes, work, strict=True)] if self.pipelined else (),
        )

    def _taken(self, division: SampleDivision, measures: bool) -> list[Taken]:
        """List what each replica takes."""
        unlike = self._unlike(division, measures)
        return [unlike[one] for one in self._shared(division, measures)]

    def _unlike(self, division: SampleDivision, measures: bool) -> dict[_Shared, Taken]:
        """Interchangeable replicas, which are one object, take their share once."""
        every = {*self._shared(division, measures)}
        if not measures:
            return {one: one[0].iteration(sum(one[1]), one[2]) for one in every}
        again = tuple(map(max, zip(*{replica.gradients for replica, *_ in every}, strict=True)))
        return {one: one[0].measuring(*one[1], one[2], again) for one in every}

    def _shared(self, division: SampleDivision, measures: bool) -> Iterable[_Shared]:
        """Yield what each replica shares."""
        in_streams = bool(division.streams)
        replicas = self._replicas(division.sizes[0], in_streams)
        if len(sizes := {*division.sizes}) > 1:
            of_size = {size: self._replicas(size, in_streams) for size in sizes}
            replicas = [of_size[size][place] for place, size in enumerate(division.sizes)]
        halves: Iterable[tuple[int, int]] = zip(division.shares, repeat(0))
        if measures and (self.pipelined or in_streams):  # else it does not matter which micro-batches are even
            halves = halves_of(division.shares)
        return zip(replicas, halves, division.copies, strict=True)


def _between(plain: Taken, measured: Taken, part: float) -> Taken:
    """The median of both, or of one that measures alone."""

    def of(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
        return tuple(a + part * (b - a) for a, b in zip(first, second, strict=True))

    (whole,) = of((plain.whole,), (measured.whole,))
    return Taken(whole, of(plain.work, measured.work), of(plain.passes, measured.passes))
