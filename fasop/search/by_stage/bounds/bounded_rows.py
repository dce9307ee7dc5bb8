"""Plans whose stages differ, but for their partition: those that are worth it by what bounds them.

Most layouts are left out by what a micro-batch takes on its way without messages; messages and all closer bounds are
found of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.search.by_stage.bounds.chains import Work
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.bounds.layout_bounds import PlacedLayouts
from fasop.search.space.candidates import MOST_REPLICAS
from megatron_ext.contract.parallel_config import Recompute, Schedule

STAGES = (0, 5, 10, 20, 2**31)
"""Layouts of which bounds are found together have numbers of stages between these."""
BOUNDS = (
    *(PlacedLayouts.trip_in_parts, PlacedLayouts.least_seconds),
    *(PlacedLayouts.trip_seconds, PlacedLayouts.turning_seconds),
)
"""Bound many layouts, each of them those that the ones before leave."""


class Row(NamedTuple):
    """A plan but for its partition."""

    bound: float
    kinds: int
    """Number of the set of nodes."""
    order: int
    numbers: tuple[int, ...]
    """Those of its options: all have this bound, but for those with a sharded optimizer."""
    layout: int
    of_sharded: float
    """The bound of these, whose sums take half the time."""


class Rows(NamedTuple):
    least: float
    """The least bound of those that are not worth it, of some."""
    every: list[Row]


class _Costs(NamedTuple):
    """What the bounds of options depend on."""

    micro_batch_size: int
    recompute: Recompute
    schedule: Schedule

    @classmethod
    def of(cls, parallel: Parallelism) -> _Costs:
        return cls(parallel.micro_batch_size, parallel.recompute, parallel.schedule)

    @property
    def last(self) -> tuple[bool, bool]:
        """What comes behind what it takes no less than."""
        return self.recompute is not Recompute.none, not self.schedule.definition.splits_backward


class _Group(NamedTuple):
    """Options whose bounds are found together."""

    costs: _Costs
    numbers: tuple[int, ...]
    one: Training
    """One of them: without a sharded optimizer if there is any."""
    whole: int
    """Which of both bounds is that of those without: 1 if all have a sharded optimizer."""
    sharded: int
    """Which is the least of them."""

    @classmethod
    def of(cls, costs: _Costs, numbers: Sequence[int], options: Sequence[Training]) -> _Group:
        first = {options[option].parallel.sharded_optimizer: options[option] for option in numbers[::-1]}
        return cls(costs, tuple(numbers), first.get(False) or first[True], int(min(first)), int(max(first)))


class BoundedRows:
    """The rows of some layouts on some nodes, with such options."""

    def __init__(
        self,
        many: LayoutBatch,
        orders: Sequence[Sequence[NodeKind]],
        names: Sequence[str],
        options: Sequence[Training],
        work: Callable[[Training], Work],
    ) -> None:
        self._many, self._orders, self._names, self._options, self._work = many, orders, names, options, work
        self._inside_nodes: dict[tuple[int, ...], list[tuple[Integers, LayoutBatch]]] = {}

    def of(self, number: int, orders: Sequence[int], worth: Callable[[Floats], NDArray[np.bool_]]) -> Iterator[Rows]:
        """Those of some node orders that are worth it, by their bounds, and the least of the others: a few of them at a
        time."""

        def may_be(bounds: Floats) -> NDArray[np.bool_]:
            return worth(bounds) & np.isfinite(bounds)

        sizes = [group.costs.micro_batch_size for group in self._groups]
        for order in orders if sizes else ():
            nodes = self._orders[order]
            quick = self._quick_bounds(nodes, may_be)
            promising = may_be(quick)
            yield Rows(float(quick[~promising].min(initial=math.inf)), [])
            left = np.flatnonzero(promising.any(axis=1)).tolist()
            for size in dict.fromkeys(sizes[group] for group in left):
                groups = [group for group in left if sizes[group] == size]
                close = np.flatnonzero(promising[groups].any(axis=0))
                placed = PlacedLayouts(self._many.take(close), nodes, self._names)
                of_size = [(self._groups[group], quick[group, close]) for group in groups]
                for group, bounds in self._close_bounds(of_size, placed, may_be):
                    lowest = bounds[group.sharded]
                    near = may_be(lowest)
                    of_near = (some[near].tolist() for some in (bounds[group.whole], close, lowest))
                    yield Rows(
                        float(lowest[~near].min(initial=math.inf)),
                        [Row(bound, number, order, group.numbers, *row) for bound, *row in zip(*of_near, strict=True)],
                    )

    def _close_bounds(
        self,
        of_size: Sequence[tuple[_Group, Floats]],
        placed: PlacedLayouts,
        worth: Callable[[Floats], NDArray[np.bool_]],
    ) -> Iterator[tuple[_Group, Floats]]:
        """Yield groups of options with micro-batches of one size, which come with the quick bounds of the layouts that
        are `placed`, and [2, layouts] their bounds without and with a sharded optimizer."""
        known, halves = dict[Schedule, Floats](), dict[Recompute, Floats]()
        for group, quick in of_size:
            costs, work = group.costs, self._work(group.one)
            bounds = np.maximum(known.get(costs.schedule, 0.0), np.stack([quick] * 2))
            if costs.schedule is Schedule.one_f_one_b:
                bounds = np.maximum(bounds, halves.get(costs.recompute, 0.0))
            lowest = bounds[group.sharded]  # where a sharded optimizer is tried, with that
            for bound in BOUNDS:
                if len(near := np.flatnonzero(worth(lowest))):
                    of_near = placed if len(near) == len(quick) else placed.take(near)
                    bounds[:, near] = np.maximum(bounds[:, near], bound(of_near, group.one, work))
                if bound is PlacedLayouts.trip_in_parts and costs.schedule.definition.splits_backward:
                    halves[costs.recompute] = bounds.copy()  # none that are whole take less
            if costs.recompute is Recompute.none:
                known[costs.schedule] = bounds  # to compute again takes no less
            yield group, bounds

    def _quick_bounds(self, nodes: Sequence[NodeKind], worth: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
        """[groups, layouts]: bounds that take little time, on nodes in one order, with every group of options; infinite
        where there are fewer micro-batches than replicas, or a tensor group lies on two nodes."""
        batches = self._inside(tuple(node.gpus for node in nodes))
        found = np.full(self._shortest.shape, math.inf)
        for some, _ in batches:
            found[:, some] = self._shortest[:, some]
        rows = np.flatnonzero(worth(found).any(axis=1)).tolist()
        promising = [(self._groups[row], found[row]) for row in rows]
        every = PlacedLayouts(self._many, nodes, self._names)
        for some, batch in batches:
            placed = PlacedLayouts(batch, nodes, self._names, (every, some))
            known, halves = dict[object, Floats](), dict[object, Floats]()
            for group, of_group in promising:
                costs = group.costs
                bounds = np.maximum(of_group[some], known.get(costs[::2], 0.0))
                if costs.schedule is Schedule.one_f_one_b:
                    bounds = np.maximum(bounds, halves.get(costs[:2], 0.0))
                if len(near := np.flatnonzero(worth(bounds))):
                    trip = placed.trip_alone(group.one, self._work(group.one), near)
                    bounds[near] = np.maximum(bounds[near], trip)
                if costs.recompute is Recompute.none:
                    known[costs[::2]] = bounds  # to compute again takes no less
                if costs.schedule.definition.splits_backward:
                    halves[costs[:2]] = bounds  # none that are whole take less
                of_group[some] = bounds
        return found

    @cached_property
    def _groups(self) -> list[_Group]:
        """Options by what their bounds depend on; those come first that take no less than others."""
        numbers = dict[_Costs, list[int]]()
        for option, one in enumerate(self._options):
            numbers.setdefault(_Costs.of(one.parallel), []).append(option)
        return [
            _Group.of(costs, own, self._options) for costs, own in sorted(numbers.items(), key=lambda row: row[0].last)
        ]

    @cached_property
    def _shortest(self) -> Floats:
        """[groups, layouts]: what `PlacedLayouts.shortest_trip` says, the same in every order; infinite where there are
        fewer micro-batches than replicas."""
        placed = PlacedLayouts(self._many, self._orders[0], self._names)
        found = np.array([placed.shortest_trip(group.one, self._work(group.one)) for group in self._groups])
        batch = self._groups[0].one.parallel.global_batch_size
        most = np.array([min(batch // group.costs.micro_batch_size, MOST_REPLICAS) for group in self._groups])
        return np.where(self._many.replicas.max(axis=1) <= most[:, np.newaxis], found, math.inf)

    def _inside(self, gpus: tuple[int, ...]) -> list[tuple[Integers, LayoutBatch]]:
        """The layouts of which every tensor group lies inside a node, by their `STAGES`, with their numbers."""
        if gpus not in self._inside_nodes:
            fine, last = self._many.inside_nodes(gpus), self._many.last
            every = [np.flatnonzero(fine & (last >= low) & (last < high)) for low, high in pairwise(STAGES)]
            self._inside_nodes[gpus] = [(some, self._many.take(some)) for some in every if len(some)]
        return self._inside_nodes[gpus]
