"""The best plans for a cluster: degrees, micro-batch, node order and partition.

Bounds decide what need not be looked at: a plan is left out only if it is proved that none of its partitions beats the
plans that are kept.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conf.schema.values.partition import Partition
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import Basis
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.search.order_search import BestOrder, Bounded, best_of_first, climb, search_partitions
from fasop.search.plan import Fault, Plan, by_time, no_fault
from fasop.search.space.candidates import Candidates, Space, bound_options, raise_known

FIRST, BATCH = 16, 64
"""Candidates of which partitions are searched together, at first and at most; what they give may leave out others."""
GAIN = 0.97
"""What moving nodes makes of a plan's time at best. (Of 174 plans of four fronts it made 0.983.)"""
NEAR = 1.03
"""Times the fastest plan on some nodes: sizes that are as fast in their first orders are worth climbing."""


TOGETHER = 16
"""Sets of nodes whose sizes are bounded together, before any of them is looked at."""
ROUNDING = 1e-9
"""The part of a time by which equal ones may differ: plans that take as long as the slowest one that is kept are
searched, since another order may prefer them."""


ShowProgress = Callable[[float], None]
"""Takes the part that is done, 0 to 1."""


def no_progress(done: float) -> None:
    """Nothing is shown."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What a search has gone through."""

    sizes: int
    """On all sets of nodes, with every schedule."""
    searched: int
    """How many of them, with their options and node orders, had their partitions searched; bounds left out others."""
    climbed: int
    """Sizes on sets of nodes with too many orders, whose best order was searched from the first ones."""
    least: float
    """Seconds below which no plan is, proved; infinite if there is none."""
    left: int = 0
    """Sizes that were worth a look when the time was up."""

    def __add__(self, other: Coverage) -> Coverage:
        """Return what both have covered together."""
        return Coverage(
            sizes=self.sizes + other.sizes,
            searched=self.searched + other.searched,
            climbed=self.climbed + other.climbed,
            least=min(self.least, other.least),
            left=self.left + other.left,
        )


class PlanCollector(Protocol):
    """The plans that a search is after."""

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        """Whether plans on all these nodes that take so many seconds would be kept, by what is kept so far.

        If not, none that takes longer would be.
        """
        ...

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        """Whether moving nodes of a plan on all these nodes that takes so long could give one that matters."""
        ...

    def add(self, plans: Sequence[Plan]) -> None: ...


class Best:
    """So many plans that take the shortest time, of each sizes, options and node order one."""

    def __init__(self, most: int, fault: Fault = no_fault) -> None:
        self._most, self._fault = most, fault
        self.plans: list[Plan] = []
        self.refused: str | None = None
        """The fault of the plan that was refused first; None: none was."""

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        slowest = self.plans[-1].total if len(self.plans) == self._most else np.inf
        return np.asarray(bounds <= slowest * (1 + ROUNDING))

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        return not self.plans or GAIN * seconds <= self.plans[0].total

    def add(self, plans: Sequence[Plan]) -> None:
        best: dict[Parallelism, Plan] = {}
        faults = [self._fault(plan) for plan in plans]
        self.refused = self.refused or next(filter(None, faults), None)
        accepted = [plan for plan, fault in zip(plans, faults, strict=True) if fault is None]
        for plan in sorted([*self.plans, *accepted], key=lambda plan: (by_time(plan), -plan.bound)):
            best.setdefault(replace(plan.training.parallel, partition=None), plan)
        self.plans = [*best.values()][: self._most]


def explore(
    spaces: Sequence[Space],
    keep: PlanCollector,
    progress: ShowProgress = no_progress,
    until: float = np.inf,
    *,
    sketched: bool = False,
) -> Coverage:
    """Hands every plan to `keep` that it may want: first on the nodes on which the fastest plan could be, and before
    that on those of one size, whose orders are looked at together.

    Args:
        until: CPU seconds of this process, from which on nothing new is begun once there is a plan. Half of what is
            left of them may go into choosing the nodes that are looked at first.
        sketched: whether plans that are kept leave out most others already, so that none need to be found early.
    """
    quick_first = sorted(spaces, key=lambda one: (len({kind.gpus for kind in one.kinds}), one.floor))
    walks = [SpaceSearch(space, keep, until) for space in quick_first]
    half = (time.process_time() + until) / 2
    for number, walk in enumerate(walks, 1):
        if (number - 1) % TOGETHER == 0 and time.process_time() <= until:
            bound_together(walks[number - 1 :][:TOGETHER])
        if not sketched and (number == 1 or time.process_time() <= half):
            walk.sketch()
        if walk.few:  # what is found leaves out most of what other nodes could do
            walk.look()
        progress(number / len(walks) / 2)
    others = sorted((walk for walk in walks if not walk.few), key=lambda walk: walk.lead)
    steps = [*(walk.climb for walk in others), *(walk.look for walk in others)]
    for number, step in enumerate(steps, 1):
        step()
        progress((1 + number / len(steps)) / 2)
    progress(1.0)
    return Coverage(
        sizes=sum(map(len, spaces)),
        searched=sum(walk.searched for walk in walks),
        climbed=sum(walk.climbed for walk in walks),
        least=min((space.least for space in spaces), default=np.inf),
        left=sum(walk.left for walk in walks),
    )


def look_beside(spaces: Sequence[Space], best: Best, until: float = np.inf, others: Sequence[Plan] = ()) -> None:
    """Looks from the layers of the best plan at the other schedules and options of its sizes, in its node order, until
    none is faster, and before that from those of some others: what moving single layers finds depends on where it
    begins. `until` is as that of `explore`."""
    begin, left = None, [*others]
    while best.plans and (left or begin is not best.plans[0]) and time.process_time() <= until:
        begin = left.pop(0) if left else best.plans[0]
        layers = np.array([begin.partition.layers]).T
        for space in spaces:
            worth = partial(best.worth, space.kinds)
            for group in space.beside(begin.training, begin.nodes, worth):
                one = Bounded.of(group, worth=worth)
                one = one.take(np.nonzero(worth(one.proved))[0])
                if len(one.group):
                    found = search_partitions(one, np.repeat(layers, len(one.group), axis=1))
                    best.add(plans_of(one.group, found[0], one.proved))


def bound_together(walks: Sequence[SpaceSearch]) -> None:
    """Raise what is known of the sizes of all of these that are worth a look, which takes less time than one by one."""
    alike = defaultdict[tuple[str, ...], list[SpaceSearch]](list)
    for walk in walks:
        if walk.wanted:
            alike[tuple(kind.name for kind in walk.space.kinds)].append(walk)
    for some in alike.values():
        of_some = [walk.space for walk in some], [walk.of_worth for walk in some]
        raise_known(*of_some)
        bound_options(*of_some)


class SpaceSearch:
    """Through all sizes of a space, the most promising first."""

    def __init__(self, space: Space, keep: PlanCollector, until: float) -> None:
        self.space, self._keep, self._until = space, keep, until
        self._first: list[int] = []
        self._built: dict[int, list[Bounded]] = {}
        """What was built of these sizes, until it is looked at."""
        self._left_out: dict[int, float] = {}
        """Seconds below which no option of these sizes is that was not built."""
        self.lead = np.inf
        """Seconds of the plan that `sketch` finds."""
        self.searched = self.climbed = self.left = 0

    @property
    def few(self) -> bool:
        return self.space.few

    def sketch(self) -> None:
        """Which sizes may have the best plan of all, those first of which the balanced partition is fastest.

        A good plan that is found early leaves out most others. Lower bounds do not lead to it: those of few stages are
        low, and far from what any plan reaches. Of all options and orders only the one with the lowest bound is
        simulated.
        """
        found: list[tuple[float, int, Bounded]] = []
        for number in self._by_floor():
            bound = float(self.space.known[number])
            if bound > self.lead or not self._keep.within_reach(self.space.kinds, bound):
                break
            if self._over() and np.isfinite(self.lead):
                break
            if groups := self._bounded(number):
                best = min(groups, key=lambda one: float(one.proved.min()))
                one = best.take(np.array([np.argmin(best.proved)]))
                seconds = float(one.group.pipelines.iteration(one.balanced)[0])
                found.append((seconds, number, one))
                self.lead = min(self.lead, seconds)
        found.sort(key=lambda row: row[:2])
        self._first = [number for _, number, _ in found]
        for seconds, _, one in found[:1]:
            self._keep_those(one, one.balanced, np.array([seconds]))

    def climb(self) -> None:
        """Where there are too many orders to look at all of them: from one of the best to better ones, for each of the
        sizes that come near the fastest.

        Which these are depends on nothing but the space, or there are more of them, whatever is kept: what is left out
        is slower than what is found, or out of reach. So a front of many spaces has what a search in each of them
        finds, as long as moving nodes gains no more than `GAIN`.
        """
        begins: dict[int, BestOrder] = {}
        fastest = np.inf
        for number, groups in self._promising():
            bound = min((one.proved.min() for one in groups), default=np.inf)
            if bound > NEAR * fastest or not self._keep.within_reach(self.space.kinds, bound):
                continue
            if (found := best_of_first(groups, self._of_reach)) is not None:
                begins[number], fastest = found, min(fastest, found.seconds)
                self.searched += 1
                self._keep_those(found.one, found.partition, np.array([found.seconds]))
        for number, begin in sorted(begins.items(), key=lambda item: item[1].seconds):
            near = begin.seconds <= NEAR * fastest and self._worth(self.space.known[number])
            if near and not self._over() and self._keep.within_reach(self.space.kinds, begin.seconds):
                self.climbed += 1
                for some, partitions, seconds in climb(self.space, number, begin, self.of_worth):
                    self.searched += len(seconds)
                    self._keep_those(some, partitions, seconds)

    def look(self) -> None:
        """At the first orders of all sizes."""
        for number, groups in self._promising():
            del self._built[number]
            if self.space.few:
                bound = min((one.proved.min() for one in groups), default=np.inf)
                self.space.known[number] = min(bound, self._left_out.get(number, np.inf))
            for one in groups:
                self._look_at(one)

    def _promising(self) -> Iterator[tuple[int, list[Bounded]]]:
        """All sizes that are worth it, by what is kept when they are reached."""
        self.left = 0
        if self._over() and not self.space.is_bounded:  # bounds of all sizes would take long
            self.left = len(self.space) if self._worth(self.space.floor) else 0
            return
        for number in [*self._first, *(number for number in self._by_floor() if number not in self._first)]:
            if not self._worth(self.space.known[number]):
                continue
            if self._over():
                self.left += 1
            else:
                yield number, self._bounded(number)

    @property
    def wanted(self) -> bool:
        """Whether any sizes may be worth a look."""
        return len(self.space) > 0 and self._worth(self.space.floor)

    def _over(self) -> bool:
        return time.process_time() > self._until

    def _by_floor(self) -> list[int]:
        """The sizes that are worth it before any plan of them is known."""
        if not self.wanted:
            return []
        self.space.raise_known(self.of_worth)
        worth = self.of_worth(self.space.known)
        return [number for number in np.argsort(self.space.known, kind="stable").tolist() if worth[number]]

    def of_worth(self, seconds: Floats) -> NDArray[np.bool_]:
        return self._keep.worth(self.space.kinds, seconds)

    def _of_reach(self, seconds: Floats) -> NDArray[np.bool_]:
        return self.of_worth(GAIN * seconds)

    def _worth(self, seconds: float) -> bool:
        return bool(self.of_worth(np.array([seconds]))[0])

    def _bounded(self, number: int) -> list[Bounded]:
        if number not in self._built:
            floor = self.space.known[number]
            groups = self.space.built(number, self.space.first, self._options(number))
            worth = self.of_worth if self.space.few else self._of_reach
            self._built[number] = [Bounded.of(group, floor, worth) for group in groups]
        return self._built[number]

    def _options(self, number: int) -> list[Training]:
        """Those that may be worth it; before nodes are moved those within reach."""
        options = self.space.options(number)
        if len(options) < 2:
            return options
        may_be = self.of_worth if self.space.few else self._of_reach
        bounds = self.space.bounds(number, options, may_be)
        worth = may_be(bounds)
        self._left_out[number] = min(bounds[~worth], default=np.inf)
        return [option for option, may in zip(options, worth, strict=True) if may]

    def _look_at(self, one: Bounded) -> None:
        """At the candidates that may be kept, those with the lowest bounds first."""
        promising, size, begin = np.argsort(one.proved, kind="stable"), FIRST, 0
        while begin < len(promising):
            batch = promising[begin : begin + size]
            batch = batch[self.of_worth(one.proved[batch])]
            if not len(batch):
                break
            some = one.take(batch)
            partitions, seconds = search_partitions(some, worth=self.of_worth)
            self._keep_those(some, partitions, seconds)
            self.searched += len(batch)
            begin, size = begin + size, min(2 * size, BATCH)

    def _keep_those(self, some: Bounded, partitions: Integers, seconds: Floats) -> None:
        kept = np.nonzero(self.of_worth(seconds))[0]
        if len(kept):
            self._keep.add(plans_of(some.group.take(kept), partitions[:, kept], some.proved[kept]))


def plans_of(group: Candidates, partitions: Integers, proved: Floats) -> list[Plan]:
    parts = group.pipelines.parts(partitions)
    plans = []
    for column, order in enumerate(group.orders):
        nodes = [group.kinds[kind] for kind in order]
        partition = Partition(tuple(partitions[:, column].tolist()))
        node_order = tuple(kind.name for kind in nodes)
        training, total = group.training(column), float(parts.total[column])
        parallel = replace(training.parallel, partition=partition.layers, node_order=node_order)
        plans.append(
            Plan(
                training=replace(training, parallel=parallel),
                partition=partition,
                nodes=nodes,
                total=total,
                known_parts=parts.of(column),
                bound=float(proved[column]) if len(partitions) > 1 else total,  # there is no other partition
                basis=Basis(int(group.pipelines.basis[column])),
                pipelines=group.pipelines.take(np.array([column])),
            )
        )
    return plans
