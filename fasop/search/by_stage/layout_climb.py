"""A climb from plans whose stages differ to faster ones near them, until none is found any more."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from operator import mul
from typing import NamedTuple

from fasop.costs.arrays import Integers
from fasop.search.by_stage.bounds.bounded_rows import Row
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.closing import Closing, Effort
from fasop.search.by_stage.neighbours import Near
from fasop.search.by_stage.staged_plans import StagedPlans
from megatron_ext.contract.layout import Layout

BUILT = 4000
"""Work that it takes to find the costs of a layout, in steps of a replay."""
WIDE = 4_000_000
"""Work, at most, once nothing else is left: near all that was fast."""
CLIMBED, MUCH = 1.01, 0.98
"""Times the best plan: near plans that take longer nothing is searched. Times a plan: once a faster one is found near
it, what is near that comes first."""
COMMON, ELSEWHERE = 0.5, 1.2
"""The part of all their stages below which two layouts have few in common. Times the best plan: from one that takes
longer no climb begins once more."""
AGAIN = 0.5
"""The part of `Effort.patience` that such a climb has."""
SKETCHED = 20
"""Work that it takes to say about how long a layout takes."""
PROBED, TRIED = 3, 1
"""How many layouts near a plan are replayed with the layers that seem to be good for them, and how many of those that
were are searched, before others have their turn: of each group."""
GROUPS = (True, True), (True, False), (False, True), (False, False)
"""In the order of their turns: layouts that differ in both ends from the plan that they are near, or not, and that have
its tensor sizes alone, or not."""
WIDER = 1.001
"""Times its seconds: as if a plan took so much longer each time that it had its turn."""
NEAR = 1.2
"""Times the best plan: from a partition that takes longer none is searched."""
CLOSE = 1.02
"""Times the best plan: partitions that take less are searched more closely."""


class _Searched(NamedTuple):
    """A candidate with the best partition that was found."""

    one: Candidate
    partition: Integers | None
    """None: it was ruled out before."""
    seconds: float
    balanced: bool
    """Whether it was found from the balanced partition."""


class Place(NamedTuple):
    """Where a candidate is: the number of its set of nodes, of its node order and of its options there."""

    kinds: int
    order: int
    number: int
    layout: Layout


class _Rest(NamedTuple):
    """What is left near a plan."""

    unseen: Iterator[tuple[Place, Near]]
    probed: list[tuple[float, int, Place, Near]]
    """Those that were replayed, as a heap, by their seconds and tickets."""


class _Begin(NamedTuple):
    """A plan near which faster ones may be; the least is the next one from which to go on."""

    rank: float
    """Seconds, and more the more layouts near it were searched."""
    ticket: int
    seconds: float
    place: Place
    layers: tuple[int, ...]
    rest: tuple[_Rest, ...] | None = None
    """Those near it that are left, by groups; None before any was replayed."""


class LayoutClimb:
    """Candidates that are built and searched for so much work, each once."""

    def __init__(self, nodes: Sequence[StagedPlans], fastest: float, effort: Effort, until: float) -> None:
        self.nodes, self.closing = nodes, Closing(fastest, effort)
        self.work = 0
        self.searched: dict[Place, _Searched] = {}
        self._effort, self._until, self._tickets = effort, until, count()
        self._fast: list[_Begin] = []
        """Plans near which faster ones may be."""
        self._done: list[_Begin] = []
        """Those that have had their turn."""
        self._places: dict[Candidate, Place] = {}
        self._built: dict[Place, Candidate] = {}
        """Those that were built, and not searched."""

    def over(self, part: float) -> bool:
        """Whether there is no time left, or more than a part of the work is done."""
        return self.work > part * self._effort.work or time.process_time() > self._until

    def place(self, row: Row, number: int) -> Place:
        return Place(row.kinds, row.order, number, self.nodes[row.kinds].wanted[row.layout])

    def build(self, place: Place) -> Candidate:
        one = self.nodes[place.kinds].candidate(place.layout, place.order, place.number)
        self._places[one] = place
        return one

    def search(self, place: Place, begins: Sequence[Sequence[int]] = ()) -> _Searched:
        """Look for the best partition, from the balanced one or others to begin with."""
        found = self.searched.get(place)
        if found is None:
            one = self._built.pop(place) if place in self._built else self._new(place)
            one.rule_out(self.closing.fastest)
            found = _Searched(one, None, math.inf, balanced=False)
        elif found.balanced or begins:
            return found
        if math.isfinite(found.one.bound) and found.one.bound <= self.closing.fastest:
            fastest = self.closing.fastest
            partition, seconds, steps = found.one.search(NEAR * fastest, begins, CLOSE * fastest)
            self.work += steps
            self.closing.keep(found.one, partition, seconds)
            if found.partition is None or seconds < found.seconds:
                found = found._replace(partition=partition, seconds=seconds)
                self.add_fast(place, partition.tolist(), seconds)
        self.searched[place] = found._replace(balanced=not begins)
        return self.searched[place]

    def _new(self, place: Place) -> Candidate:
        self.work += BUILT
        return self.build(place)

    def _probe(self, place: Place, one: Near) -> float:
        """Seconds with the layers that are given or, if these take less, balanced ones; infinite if they are worth no
        search."""
        candidate = self._built[place] = self._new(place)
        if not candidate.bound <= self.closing.fastest:
            return math.inf
        taken = candidate.seconds(candidate.begins(one.partitions))
        self.work += candidate.steps
        return float(taken.min())

    def climb_from_best(self, part: float) -> None:
        """LayoutClimb from what closer bounds came upon."""
        for one, partition in self.closing.best:
            if (found := self.searched.get(self._places[one])) is None or found.seconds > self.closing.fastest:
                self.add_fast(self._places[one], partition.tolist(), self.closing.fastest)
                self.climb(part)

    def add_fast(self, place: Place, layers: Sequence[int], seconds: float) -> None:
        heappush(self._fast, _Begin(seconds, next(self._tickets), seconds, place, tuple(layers)))

    def climb(self, part: float) -> None:
        """Search what seems best near the fastest plans, until a part of the work is done."""
        while self._fast and self._fast[0].rank <= CLIMBED * self.closing.fastest and not self.over(part):
            begin = self._took_turn(heappop(self._fast))
            for place, one in self._next(begin):
                self.search(place, one.partitions)
                if self.closing.fastest < MUCH * begin.seconds:
                    break
            self._done.append(begin)

    def climb_wider(self) -> None:
        """Go on near all that was fast; where that finds a faster plan, there may be more, but none near that one: then
        climb once more from the fastest plan that has few stages in common with it."""
        before = self.closing.fastest
        self._climb_wider([*self._fast, *self._done], before, self._effort.patience)
        if self.closing.fastest < before:
            best, *others = sorted([*self._fast, *self._done], key=lambda one: one.seconds)
            few = (one for one in others if _common(one.place.layout, best.place.layout) < COMMON)
            other = next(few, best)
            if best.seconds < other.seconds <= ELSEWHERE * best.seconds:
                self._climb_wider([other._replace(rank=other.seconds)], other.seconds, AGAIN * self._effort.patience)

    def _climb_wider(self, begins: Sequence[_Begin], fastest: float, patience: float) -> None:
        """Search a few layouts near these plans and those found on the way, whenever a plan's turn comes, until none of
        so many is faster than the fastest of them, for so much work."""
        self._fast, tried = sorted(begins), 0
        begun, part = self.work, (self.work + WIDE) / max(self._effort.work, 1)
        while self._fast and self._fast[0].rank <= CLIMBED * fastest and not self.over(part):
            begin = self._took_turn(heappop(self._fast))
            heappush(self._fast, begin)
            for place, one in self._next(begin):
                found = self.search(place, one.partitions).seconds
                tried += 1
                if found < fastest:
                    tried, begun, fastest = 0, self.work, found
                if tried >= patience and self.work >= begun + self._effort.in_vain:
                    return
                if fastest < MUCH * begin.seconds:
                    break

    def _took_turn(self, begin: _Begin) -> _Begin:
        rest = self._near(begin) if begin.rest is None else begin.rest
        return begin._replace(rank=WIDER * begin.rank, ticket=next(self._tickets), rest=rest)

    def _next(self, begin: _Begin) -> Iterator[tuple[Place, Near]]:
        """Yield those near it whose turn it is."""
        assert begin.rest is not None
        for unseen, probed in begin.rest:
            for place, one in islice(unseen, PROBED):
                seconds = self._probe(place, one)
                if seconds < NEAR * self.closing.fastest:
                    heappush(probed, (seconds, next(self._tickets), place, one))
            for _ in range(min(TRIED, len(probed))):
                _, _, place, one = heappop(probed)
                yield place, one

    def _near(self, begin: _Begin) -> tuple[_Rest, ...]:
        """List what was not searched of the layouts near a plan by groups, those first that seem to be the fastest."""
        nodes, place = self.nodes[begin.place.kinds], begin.place
        unlike = len({*zip(place.layout.tensors, place.layout.replicas, strict=True)}) > 1
        if unlike and begin.seconds <= self.closing.fastest:
            for number in nodes.other_micro_batches(place.layout, place.number):
                if (other := place._replace(number=number)) not in self.searched:
                    self.search(other, [begin.layers])
        every = nodes.near(place.layout, begin.layers, place.order, place.number)
        self.work += SKETCHED * len(every)
        own, groups = {*place.layout.tensors}, {group: list[Near]() for group in GROUPS}
        for one in every:
            groups[one.both_ends, own.issuperset(one.layout.tensors)].append(one)

        def unseen(group: Sequence[Near]) -> Iterator[tuple[Place, Near]]:
            for one in group:
                where = place._replace(layout=one.layout)
                if one.bound <= self.closing.fastest and where not in self.searched and where not in self._built:
                    yield where, one

        return tuple(_Rest(unseen(group), []) for group in groups.values())


def _common(one: Layout, other: Layout) -> float:
    """The part of all stages of two layouts that both have, on the same GPUs."""
    some, others = (
        {*zip(accumulate(map(mul, of.tensors, of.replicas)), of.tensors, of.replicas, strict=True)}
        for of in (one, other)
    )
    return len(some & others) / len(some | others)
