"""What an iteration takes one replica, and a set of nodes by its replicas; and what a run's stopwatch shows of it
(megatron_ext/engine/results.py).

A pipeline's iteration is replayed action by action. One that measures the noise takes the even micro-batches of the
global batch first, then the odd ones, so that the pipeline fills and empties twice; then it sums a second gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from fasop.costs.arrays import Floats
from fasop.costs.stream_rates import NO_GAIN, StreamRates
from fasop.simulation.iteration import Durations, replay
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.iteration import SampleDivision, as_json, schedule

FULL = 8
"""Micro-batches for each stage from which on a pipeline runs periodically."""
PERIOD = 12
"""Micro-batches of such a period: stages that wait for each other repeat themselves after a few."""


_Halves = tuple[int, ...]
"""Micro-batches of an iteration: all of them, or the even ones and the odd ones."""


class Taken(NamedTuple):
    """Seconds of an iteration."""

    whole: float
    """If no other replica were slower."""
    work: tuple[float, ...]
    """What each stage does itself."""
    passes: tuple[float, ...]
    """For each stage, that and its waits for other stages."""


class ReplicaTimes(Protocol):
    """Replicas that take the same share one."""

    def iteration(self, count: int, streams: int) -> Taken:
        """With so many micro-batches, in so many streams."""
        ...

    def measuring(self, even: int, odd: int, streams: int, again: tuple[float, ...]) -> Taken:
        """In an iteration that measures, with so many even and odd micro-batches; `again` are the seconds of the second
        sum of gradients, by stage."""
        ...

    @property
    def gradients(self) -> tuple[float, ...]:
        """Seconds in which they are summed, by stage, as far as the backward pass does not hide it."""
        ...


class OneStage:
    """A replica of one stage."""

    def __init__(self, durations: Durations, rates: StreamRates = NO_GAIN) -> None:
        (times,) = durations.times
        self._micro_batch_s = times.forward[0] + times.backward[0]
        self.gradients, self._step = tuple(durations.gradients), durations.optimizer[0]
        self._rate, self._copy_s = cache(rates.rate), rates.copy_s
        self._known: dict[tuple[int, int, int, float], Taken] = {}

    def iteration(self, count: int, streams: int) -> Taken:
        return self._taken(count, 0, streams, 0.0)

    def measuring(self, even: int, odd: int, streams: int, again: tuple[float, ...]) -> Taken:
        return self._taken(even, odd, streams, again[0])

    def _beside(self, count: int, streams: int) -> float:
        """In rounds, the last of which may have fewer micro-batches than there are streams; then the gradients of the
        streams are added up."""
        most, left = count - count % streams, count % streams
        passes = sum(of / self._rate(n) for of, n in ((most, streams), (left, left)) if of)
        return self._micro_batch_s * passes + ((streams - 1) * self._copy_s if count else 0.0)

    def _taken(self, even: int, odd: int, streams: int, again: float) -> Taken:
        key = even, odd, streams, again
        if key not in self._known:
            work = self._beside(even, streams) + self._beside(odd, streams)
            self._known[key] = Taken(work + self.gradients[0] + again + self._step, (work,), (work,))
        return self._known[key]


class SeveralStages:
    """A replica that is a pipeline, or whose stages have several chunks."""

    def __init__(self, name: str, chunks: int, durations: Durations) -> None:
        self._name, self._chunks = name, chunks
        self._durations = durations
        self.gradients = tuple(durations.gradients)
        self._each = [sum(times.forward) + sum(times.backward) for times in durations.times]
        self._known: dict[tuple[_Halves, tuple[float, ...]], Taken] = {}

    def iteration(self, count: int, streams: int = 1) -> Taken:
        return self._taken((count,), ())

    def measuring(self, even: int, odd: int, streams: int, again: tuple[float, ...]) -> Taken:
        return self._taken(tuple(count for count in (even, odd) if count), again)

    def _taken(self, halves: _Halves, again: tuple[float, ...]) -> Taken:
        """With so many micro-batches, one half after the other; each fills and empties the pipeline."""
        key = halves, again
        if key not in self._known:
            full = max(FULL * len(self._each), 2 * PERIOD)
            over = [max(0, -(-(count - full) // PERIOD)) if self._chunks == 1 else 0 for count in halves]
            self._known[key] = self._periodic(halves, over, again) if any(over) else self.replayed(halves, again)
        return self._known[key]

    def _periodic(self, halves: _Halves, over: Sequence[int], again: tuple[float, ...]) -> Taken:
        """Work out a pipeline that is full for long: whole periods, of which one is looked at, are added."""
        counts = [count - periods * PERIOD for count, periods in zip(halves, over, strict=True)]

        def numbers(of: Sequence[int]) -> Floats:
            taken = self._taken(tuple(of), again)
            return np.array([taken.whole, *taken.work, *taken.passes])

        last = numbers(counts)
        found = last.copy()
        for half, periods in enumerate(over):
            before = [count - PERIOD * (number == half) for number, count in enumerate(counts)]
            if periods:
                found += periods * (last - numbers(before))
        whole, *others = found.tolist()
        stages = len(self._each)
        return Taken(whole, tuple(others[:stages]), tuple(others[stages:]))

    def replayed(self, halves: _Halves, again: tuple[float, ...]) -> Taken:
        """The same, action by action."""
        sums = [own + more for own, more in zip(self.gradients, again or [0.0] * len(self._each), strict=True)]
        durations = replace(self._durations, gradients=sums)
        lists = [schedule(self._name, len(self._each), self._chunks, count) for count in halves]
        actions = [as_json(one, self._chunks, count)["actions"] for one, count in zip(lists, halves, strict=True)]
        together = [list(chain(*of_stage)) for of_stage in zip(*actions, strict=True)]
        seconds, events = replay({"actions": together}, durations)
        begun, ends = min(durations.optimizer), [0.0] * len(self._each)
        for event in events:
            if event.micro_batch >= 0:
                ends[event.stage] = max(ends[event.stage], event.end)
        passes = [end - (step - begun) for end, step in zip(ends, durations.optimizer, strict=True)]
        return Taken(seconds, tuple(sum(halves) * each for each in self._each), tuple(passes))


def halves_of(shares: Sequence[int]) -> list[tuple[int, int]]:
    """How many even and odd micro-batches of the iteration each replica has (`deal.dealt`)."""
    moments = [(2 * np.arange(count) + 1) / (2 * count) for count in shares]
    replicas = np.repeat(np.arange(len(shares)), shares)
    order = np.argsort(np.concatenate(moments), kind="stable")
    odd = np.bincount(replicas[order[1::2]], minlength=len(shares)).tolist()
    return [(count - of, of) for count, of in zip(shares, odd, strict=True)]


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
