"""A search among plans whose stages differ in replicas (`parallel.replicas`) or tensor sizes (`parallel.tensor`).

First a bound of all layouts on all node orders at once leaves out what cannot be better than the plans that are kept;
the others are looked at for so much work: first those in the node order of the best plan, in each order first those
that promise to be fast, and then those with the lowest bounds. What then may still be better is bounded more closely
(`fasop.search.by_stage.closing`). Work is counted, not timed, so that the same search says the same everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from conf.schema.values.partition import NodeOrder
from fasop.costs.arrays import Integers
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.training import Training
from fasop.search.by_stage.bounded_rows import Row
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.closing import Closing, Effort
from fasop.search.by_stage.neighbours import Near
from fasop.search.by_stage.staged_plans import SCHEDULES, StagedPlans
from fasop.search.search import Best
from fasop.search.space.choices import Choices
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Shards

BUILT = 4000
"""Work that it takes to find the costs of a layout, in steps of a replay."""
CLIMB = 0.2
"""The part of the work after which nothing near the best plan is searched."""
OWN_ORDER, OTHER_ORDERS = (0.35, 0.4, 0.7), (0.9, 0.95, 1.0)
"""The parts of the work after which no plan is searched that promises to be fast, none near a fast one, and none that
bounds allow: in the node order of the best plan, and in others."""
ONLY = (*OWN_ORDER[:2], 1.0)
"""The same where there is a single order."""
LAST = 2.0
"""The same once bounds are closer and have led to a faster plan."""
WIDE, IN_VAIN = 4_000_000, 250_000
"""Work, at most, once nothing else is left: near all that was fast. And the work that is tried without finding a faster
plan, at least: of few stages that is more layouts than `Effort.patience`."""
CLIMBED, MUCH = 1.01, 0.98
"""Times the best plan: near plans that take longer nothing is searched. Times a plan: once a faster one is found near
it, what is near that comes first."""
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


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was gone through."""

    said: str
    """In words, which layouts on which nodes."""
    layouts: int
    """On all sets of nodes."""
    nodes: str
    """In words, which sets."""
    orders: int
    """Node orders of these."""
    schedules: str
    """In words."""
    least: float
    """Seconds below which none of them is, proved; infinite if there are none."""
    left: int
    """Plans but for their partition that may be better, and were not looked at."""


class _Searched(NamedTuple):
    """A candidate with the best partition that was found."""

    one: Candidate
    partition: Integers | None
    """None: it was ruled out before."""
    seconds: float
    balanced: bool
    """Whether it was found from the balanced partition."""


class _Place(NamedTuple):
    """Where a candidate is: the number of its set of nodes, of its node order and of its options there."""

    kinds: int
    order: int
    number: int
    layout: Layout


class _Rest(NamedTuple):
    """What is left near a plan."""

    unseen: Iterator[tuple[_Place, Near]]
    probed: list[tuple[float, int, _Place, Near]]
    """Those that were replayed, as a heap, by their seconds and tickets."""


class _Begin(NamedTuple):
    """A plan near which faster ones may be; the least is the next one from which to go on."""

    rank: float
    """Seconds, and more the more layouts near it were searched."""
    ticket: int
    seconds: float
    place: _Place
    layers: tuple[int, ...]
    rest: tuple[_Rest, ...] | None = None
    """Those near it that are left, by groups; None before any was replayed."""


class _Options(NamedTuple):
    """Options of a row that have one bound; of two such, those that are looked at first are less."""

    bound: float
    row: Row
    numbers: tuple[int, ...]


class _Search:
    """Candidates that are built and searched for so much work, each once."""

    def __init__(self, nodes: Sequence[StagedPlans], fastest: float, effort: Effort, until: float) -> None:
        self.nodes, self.closing = nodes, Closing(fastest, effort)
        self.work = 0
        self.searched: dict[_Place, _Searched] = {}
        self._effort, self._until, self._tickets = effort, until, count()
        self._fast: list[_Begin] = []
        """Plans near which faster ones may be."""
        self._done: list[_Begin] = []
        """Those that have had their turn."""
        self._places: dict[Candidate, _Place] = {}
        self._built: dict[_Place, Candidate] = {}
        """Those that were built, and not searched."""

    def over(self, part: float) -> bool:
        """Whether there is no time left, or more than a part of the work is done."""
        return self.work > part * self._effort.work or time.process_time() > self._until

    def place(self, row: Row, number: int) -> _Place:
        return _Place(row.kinds, row.order, number, self.nodes[row.kinds].wanted[row.layout])

    def build(self, place: _Place) -> Candidate:
        one = self.nodes[place.kinds].candidate(place.layout, place.order, place.number)
        self._places[one] = place
        return one

    def search(self, place: _Place, begins: Sequence[Sequence[int]] = ()) -> _Searched:
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

    def _new(self, place: _Place) -> Candidate:
        self.work += BUILT
        return self.build(place)

    def _probe(self, place: _Place, one: Near) -> float:
        """Seconds with the layers that are given or, if these take less, balanced ones; infinite if they are worth no
        search."""
        candidate = self._built[place] = self._new(place)
        if not candidate.bound <= self.closing.fastest:
            return math.inf
        taken = candidate.seconds(candidate.begins(one.partitions))
        self.work += candidate.steps
        return float(taken.min())

    def climb_from_best(self, part: float) -> None:
        """Climb from what closer bounds came upon."""
        for one, partition in self.closing.best:
            if (found := self.searched.get(self._places[one])) is None or found.seconds > self.closing.fastest:
                self.add_fast(self._places[one], partition.tolist(), self.closing.fastest)
                self.climb(part)

    def add_fast(self, place: _Place, layers: Sequence[int], seconds: float) -> None:
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
        """Go on near all that was fast, a few layouts whenever its turn comes, until none of so many is faster than the
        fastest plan, for so much work."""
        self._fast, tried, fastest = sorted([*self._fast, *self._done]), 0, self.closing.fastest
        begun, part = self.work, (self.work + WIDE) / max(self._effort.work, 1)
        while self._fast and self._fast[0].rank <= CLIMBED * fastest and not self.over(part):
            begin = self._took_turn(heappop(self._fast))
            for place, one in self._next(begin):
                self.search(place, one.partitions)
                tried += 1
                if self.closing.fastest < fastest:
                    tried, begun, fastest = 0, self.work, self.closing.fastest
                if tried >= self._effort.patience and self.work >= begun + IN_VAIN:
                    return
                if fastest < MUCH * begin.seconds:
                    break
            heappush(self._fast, begin)

    def _took_turn(self, begin: _Begin) -> _Begin:
        rest = self._near(begin) if begin.rest is None else begin.rest
        return begin._replace(rank=WIDER * begin.rank, ticket=next(self._tickets), rest=rest)

    def _next(self, begin: _Begin) -> Iterator[tuple[_Place, Near]]:
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

        def unseen(group: Sequence[Near]) -> Iterator[tuple[_Place, Near]]:
            for one in group:
                where = place._replace(layout=one.layout)
                if one.bound <= self.closing.fastest and where not in self.searched and where not in self._built:
                    yield where, one

        return tuple(_Rest(unseen(group), []) for group in groups.values())


def why_not(training: Training, kinds: Sequence[NodeKind], choices: Choices, effort: Effort) -> str | None:
    """Why no plan can have stages that differ, and what to do about it; None if some can."""
    if training.equal_only:
        return "Megatron's stages are all alike; use engine=tdpp, or leave it out"
    if training.parallel.zero is not None:
        return f"stages that differ cannot have parallel.zero={training.parallel.zero}; use 1, or leave it out"
    if training.parallel.shards is Shards.memory:
        return f"stages that differ cannot have parallel.shards={Shards.memory}; use {Shards.equal}, or leave it out"
    if not any(schedule in SCHEDULES for schedule in choices.schedule):
        return (
            f"stages that differ cannot have parallel.schedule={','.join(choices.schedule)}; try one of "
            f"{', '.join(SCHEDULES)}, or leave it out"
        )
    if gpus_of(kinds) > effort.gpus:
        return f"{gpus_of(kinds)} GPUs exceed the limit of {effort.gpus}; use fewer nodes, or leave it out"
    return None


def explore_stages(
    training: Training, sets: Sequence[Sequence[NodeKind]], choices: Choices, keep: Best, effort: Effort, until: float
) -> Looked | None:
    """Hands the fastest plans whose stages differ to `keep`, which keeps one plan, on these sets of nodes, the first
    being the largest; None if there can be none, or nothing is looked at.

    Args:
        until: CPU seconds of this process, from which on nothing new is begun.

    Raises:
        SearchError: a profile has no costs for a tensor size.
    """
    if why_not(training, sets[0], choices, effort):
        return None
    staged = (StagedPlans(training, kinds, choices, effort.layouts) for kinds in sets)
    nodes = [some for some in staged if some.wanted]
    if not nodes:
        return None
    first = [node.name for node in keep.plans[0].nodes] if keep.plans else []
    search = _climbed(nodes, keep, effort, until)
    closing, left, least = search.closing, 0, math.inf
    most = effort.work // BUILT + effort.raised + 2  # of which candidates are built, before there is no work left

    # What is found in the order of the best plan leaves out most of the others.
    only = sum(len(some.orders) for some in nodes) == 1
    for elsewhere, (for_promising, for_near, for_all) in ((False, ONLY if only else OWN_ORDER), (True, OTHER_ORDERS)):
        rows = list[Row]()
        for number, some in enumerate(nodes):
            names = ([node.name for node in order] for order in some.orders)
            orders = [order for order, own in enumerate(names) if (own != first) == elsewhere]
            for of_group in some.rows(number, orders, lambda bounds: bounds <= closing.fastest):
                rows += of_group.every
                least = min(least, of_group.least)
        # Those without a sharded optimizer that have a sibling with one, which takes less time and memory, come later.
        for later in (False, True):
            every = [*_options(nodes, rows, later=later)]
            for promising in nsmallest(most, every, key=lambda one: nodes[one.row.kinds].estimate(one.row, one.bound)):
                for number in promising.numbers if promising.bound <= closing.fastest else ():
                    if not search.over(for_promising):
                        search.search(search.place(promising.row, number))
            search.climb(for_near)
            nearest = nsmallest(most, every)
            for bound, row, number in ((one.bound, one.row, number) for one in nearest for number in one.numbers):
                place = search.place(row, number)
                if bound > closing.fastest:
                    least = min(least, bound)
                    continue
                over, known = search.over(for_all), search.searched.get(place)
                if over and known is None:
                    closing.put_off(bound, partial(search.build, place))
                    left += 1
                    continue
                found = known if over and known else search.search(place)
                found.one.rule_out(min(closing.fastest, math.nextafter(found.seconds, 0.0)))
                if found.partition is None or found.one.bound > closing.fastest:
                    least = min(least, found.one.bound)
                else:
                    closing.add(found.one, found.partition, found.seconds)
            if len(every) > most:  # no bound of these is less than that of the last one that was put off or left out
                behind = (one for one in every if nearest[-1] < one and one.bound <= closing.fastest)
                left += sum(
                    search.place(one.row, number) not in search.searched for one in behind for number in one.numbers
                )
    least = min(least, closing.run(until))
    search.climb_from_best(LAST)
    search.climb_wider()
    closing.tighten(until)
    keep.add([one.plan(partition) for one, partition in closing.best])
    said = " and ".join(dict.fromkeys(some.every.said for some in nodes if some.wanted))
    layouts = sum(len(some.wanted) for some in nodes)
    where = " and ".join(
        str(NodeOrder(tuple(kind.name for kind in some.kinds for _ in range(kind.group.count))))
        for some in nodes
        if some.wanted
    )
    return Looked(
        said=said,
        nodes=where,
        layouts=layouts,
        orders=sum(len(some.orders) for some in nodes),
        schedules=", ".join(schedule.label for schedule in choices.schedule if schedule in SCHEDULES),
        least=least,
        left=left,
    )


def explore_near(
    training: Training, sets: Sequence[Sequence[NodeKind]], choices: Choices, keep: Best, effort: Effort, until: float
) -> bool:
    """Do as `explore_stages` near the plan that is kept, in much less time. Returns whether there was any."""
    if why_not(training, sets[0], choices, effort):
        return False
    nodes = [StagedPlans(training, kinds, choices, effort.layouts) for kinds in sets]
    search = _climbed(nodes, keep, effort, until)
    keep.add([one.plan(partition) for one, partition in search.closing.best])
    return bool(search.searched)


def _climbed(nodes: Sequence[StagedPlans], keep: Best, effort: Effort, until: float) -> _Search:
    """A search that has climbed from the plans that are kept."""
    search = _Search(nodes, min((plan.total for plan in keep.plans), default=math.inf), effort, until)
    for best in keep.plans:
        parallel = best.training.parallel
        layers = np.reshape(best.partition.layers, (parallel.chunks, -1)).sum(axis=0).tolist()
        for number, some in enumerate(nodes):
            for order, option in some.places_of(best):
                place = _Place(number, order, option, parallel.layout)
                search.add_fast(place, layers, best.total)
                if not parallel.alike and effort.proves:  # its own bound is raised as well
                    one, partition = search.build(place), np.array(layers)
                    search.closing.keep(one, partition, float(one.seconds(partition.reshape(-1, 1))[0]))
    search.climb(CLIMB)
    return search


def _options(nodes: Sequence[StagedPlans], rows: Sequence[Row], *, later: bool) -> Iterator[_Options]:
    """Those of all rows that are looked at `later` than others of their row, or first."""
    known: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for row in rows:
        key = row.kinds, row.numbers
        if key not in known:
            of_row = nodes[row.kinds].options
            shared = tuple(number for number in row.numbers if of_row[number].parallel.sharded_optimizer)
            known[key] = shared, tuple(number for number in row.numbers if number not in shared)
        shared, others = known[key]
        if others and max(nodes[row.kinds].wanted[row.layout].replicas) == 1:  # there is nothing to share out
            shared = ()
        if shared and not later:
            yield _Options(row.of_sharded, row, shared)
        elif others and bool(shared) == later:
            yield _Options(row.bound, row, others)
