"""Plans whose stages differ, but for their partition: which there are on some nodes, and what bounds each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conf.schema.values.partition import Shares
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.layers import measured_tensor_sizes
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.search.by_stage.bounds import Work, sized
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.layout_batch import LayoutBatch
from fasop.search.by_stage.layout_bounds import PlacedLayouts
from fasop.search.by_stage.layouts import Layouts, layouts
from fasop.search.by_stage.neighbours import Near, Sketches, near
from fasop.search.plan import Plan
from fasop.search.space import node_orders
from fasop.search.space.candidates import MOST_REPLICAS, divisors, fastest_first
from fasop.search.space.choices import SEARCHED, Choices
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Recompute, Schedule

SCHEDULES = tuple(schedule for schedule in SEARCHED if not schedule.definition.has_chunks)
"""Those of stages with unlike numbers of replicas."""
PLACED = 600_000
"""Layouts times node orders of which bounds are found, at most: of more orders there are fewer layouts."""
STAGES = (0, 5, 10, 20, 2**31)
"""Layouts of which bounds are found together have numbers of stages between these."""
PER_CHANGE, PER_PART = 0.05, 0.6
"""How much longer than its bound a plan takes (logarithms), for each factor of e by which stages differ, and if a
replica has but one of the micro-batches."""
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
    """The least bound of those that are not worth it."""
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


class StagedPlans:
    """All layouts on all orders of some nodes."""

    def __init__(self, training: Training, kinds: Sequence[NodeKind], choices: Choices, most: int) -> None:
        self.kinds = [kind for kind in kinds if kind.group.count]
        self.names = [kind.name for kind in self.kinds]
        self._training, self._choices = training, choices
        gpus = [kind.gpus for kind in self.kinds]
        self.tensors = tensor_sizes(training, self.kinds, choices)
        self._stages = min(training.blocks.most_stages, gpus_of(self.kinds))
        self.orders = self._orders() if self.tensors else []
        self.options = [*self._options()] if self.tensors else []
        self._gpus, self._most_layouts = math.gcd(*gpus), min(most, PLACED // max(1, len(self.orders)))
        self._works: dict[tuple[object, ...], Work] = {}
        self._shortest_trips: dict[_Costs, Floats] = {}
        self._inside_nodes: dict[tuple[int, ...], list[tuple[Integers, LayoutBatch]]] = {}

    @cached_property
    def every(self) -> Layouts:
        """The layouts of these nodes, so many at most."""
        if not self.tensors:
            return Layouts((), "")
        return layouts(gpus_of(self.kinds), self._gpus, self.tensors, self._stages, self._most_layouts)

    @cached_property
    def wanted(self) -> list[Layout]:
        """Those whose sizes are to be tried."""
        return [layout for layout in self.every.every if self._tries(layout)]

    @cached_property
    def many(self) -> LayoutBatch:
        return LayoutBatch.of(self.wanted)

    def _orders(self) -> list[list[NodeKind]]:
        counts = [kind.group.count for kind in self.kinds]
        if node_orders.few(counts):
            found = node_orders.orders(counts).tolist()
        else:
            fastest = fastest_first(self.kinds, sized(self._training, self.tensors[0]))
            found = [
                [fastest[kind] for kind in order]
                for order in node_orders.starts([counts[kind] for kind in fastest]).tolist()
            ]
        return [[self.kinds[kind] for kind in order] for order in found]

    def _options(self) -> Iterator[Training]:
        """All but layout and order; those that save memory come last."""
        training, parallel = self._training, self._training.parallel
        plain = replace(parallel, tensor=max(self.tensors), data=1, pipeline=1)
        for size in self._choices.micro_batch_size or divisors(parallel.global_batch_size):
            if parallel.global_batch_size % size:
                continue
            for schedule in self._choices.schedule:
                if schedule in SCHEDULES:
                    one = replace(plain, micro_batch_size=size, schedule=schedule, data=_more(parallel, size))
                    for variant in self._choices.variants(one):
                        if not variant.sequence_parallel or training.model.sequence_length % max(self.tensors) == 0:
                            yield replace(training, parallel=replace(variant, tensor=1, data=1))

    def rows(self, number: int, orders: Sequence[int], worth: Callable[[Floats], NDArray[np.bool_]]) -> Iterator[Rows]:
        """Those of some node orders that are worth it, by their bounds, and for each group of options and order the
        least of the others."""

        def may_be(bounds: Floats) -> NDArray[np.bool_]:
            return worth(bounds) & np.isfinite(bounds)

        sizes = dict.fromkeys(group.costs.micro_batch_size for group in self._groups)
        for order in orders:
            nodes = self.orders[order]
            every = [*zip(self._groups, self._quick_bounds(nodes, may_be), strict=True)]
            for of_size in ([pair for pair in every if pair[0].costs.micro_batch_size == size] for size in sizes):
                close = np.flatnonzero(may_be(np.min([bounds for _, bounds in of_size], axis=0)))
                placed = PlacedLayouts(self.many.take(close), nodes, self.names)
                for group, quick, bounds in self._close_bounds(of_size, close, placed, may_be):
                    lowest = quick[close] = bounds[group.sharded]
                    kept = np.flatnonzero(may_be(lowest))
                    rows = zip(
                        bounds[group.whole, kept].tolist(), close[kept].tolist(), lowest[kept].tolist(), strict=True
                    )
                    yield Rows(
                        float(quick[~may_be(quick)].min(initial=math.inf)),
                        [Row(bound, number, order, group.numbers, place, other) for bound, place, other in rows],
                    )

    def _close_bounds(
        self,
        of_size: Sequence[tuple[_Group, Floats]],
        close: Integers,
        placed: PlacedLayouts,
        worth: Callable[[Floats], NDArray[np.bool_]],
    ) -> Iterator[tuple[_Group, Floats, Floats]]:
        """Yield groups of options with micro-batches of one size, with their quick bounds and [2, layouts] those of
        layouts that are `close`, without and with a sharded optimizer."""
        known, halves = dict[Schedule, Floats](), np.zeros(1)
        for group, quick in of_size:
            costs, work = group.costs, self._work(group.one)
            bounds = np.maximum(known.get(costs.schedule, 0.0), np.stack([quick[close]] * 2))
            if costs.schedule is Schedule.one_f_one_b:
                bounds = np.maximum(bounds, halves)
            lowest = bounds[group.sharded]  # where a sharded optimizer is tried, with that
            for bound in BOUNDS:
                if len(near := np.flatnonzero(worth(lowest))):
                    of_near = placed if len(near) == len(close) else placed.take(near)
                    bounds[:, near] = np.maximum(bounds[:, near], bound(of_near, group.one, work))
                if bound is PlacedLayouts.trip_in_parts and costs.schedule.definition.splits_backward:
                    halves = bounds.copy() if halves.ndim == 1 else halves  # none that are whole take less
            if costs.recompute is Recompute.none:
                known[costs.schedule] = bounds  # to compute again takes no less
            yield group, quick, bounds

    def _quick_bounds(self, nodes: Sequence[NodeKind], worth: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
        """[groups, layouts]: bounds that take little time, on nodes in one order, with every group of options; infinite
        where there are fewer micro-batches than replicas, or a tensor group lies on two nodes."""
        found = np.full((len(self._groups), len(self.wanted)), math.inf)
        for some, batch in self._inside(tuple(node.gpus for node in nodes)):
            placed, known = PlacedLayouts(batch, nodes, self.names), dict[object, Floats]()
            for group, of_group in zip(self._groups, found, strict=True):
                costs, one, work = group.costs, group.one, self._work(group.one)
                bounds = np.maximum(self._shortest(group)[some], known.get(costs[::2], 0.0))
                if worth(bounds).any():
                    bounds = np.maximum(bounds, placed.trip_alone(one, work))
                if costs.recompute is Recompute.none:
                    known[costs[::2]] = bounds  # to compute again takes no less
                of_group[some] = bounds
        return found

    @cached_property
    def _groups(self) -> list[_Group]:
        """Options by what their bounds depend on; those come first that take no less than others."""
        numbers = dict[_Costs, list[int]]()
        for option, one in enumerate(self.options):
            numbers.setdefault(_Costs.of(one.parallel), []).append(option)
        return [
            _Group.of(costs, own, self.options) for costs, own in sorted(numbers.items(), key=lambda row: row[0].last)
        ]

    def _shortest(self, group: _Group) -> Floats:
        """[layouts]: what `PlacedLayouts.shortest_trip` says, the same in every order; infinite where there are fewer
        micro-batches than replicas."""
        costs = group.costs
        if costs not in self._shortest_trips:
            most = min(self._training.parallel.global_batch_size // costs.micro_batch_size, MOST_REPLICAS)
            placed = PlacedLayouts(self.many, self.orders[0], self.names)
            trip = placed.shortest_trip(group.one, self._work(group.one))
            self._shortest_trips[costs] = np.where(self.many.replicas.max(axis=1) <= most, trip, math.inf)
        return self._shortest_trips[costs]

    def _inside(self, gpus: tuple[int, ...]) -> list[tuple[Integers, LayoutBatch]]:
        """The layouts of which every tensor group lies inside a node, by their `STAGES`, with their numbers."""
        if gpus not in self._inside_nodes:
            fine, last = self.many.inside_nodes(gpus), self.many.last
            every = [np.flatnonzero(fine & (last >= low) & (last < high)) for low, high in pairwise(STAGES)]
            self._inside_nodes[gpus] = [(some, self.many.take(some)) for some in every if len(some)]
        return self._inside_nodes[gpus]

    def estimate(self, row: Row, bound: float) -> float:
        """Seconds that plans may take which have such a bound, to say which are worth a look.

        Replicas with few micro-batches each, and stages that differ, take longer than their bounds say. The factors
        were fitted to 350 plans on two clusters, where bounds alone had the slowest plans first.
        """
        parallel = self.options[row.numbers[0]].parallel
        count = parallel.global_batch_size // parallel.micro_batch_size
        return bound * math.exp(PER_CHANGE * self._changes[row.layout] + PER_PART * self._most[row.layout] / count)

    @cached_property
    def _changes(self) -> list[float]:
        """[layouts]: by what factors stages' replicas and tensor groups differ from those before: logarithms."""
        many = self.many
        steps = np.abs(np.diff(np.log(many.replicas), axis=1)) + np.abs(np.diff(np.log(many.tensors), axis=1))
        changes: list[float] = (steps * many.exists[:, 1:]).sum(axis=1).tolist()
        return changes

    @cached_property
    def _most(self) -> list[int]:
        """[layouts]: replicas of a stage, at most."""
        most: list[int] = (self.many.replicas * self.many.exists).max(axis=1).tolist()
        return most

    def near(self, begin: Near, order: int, option: int) -> list[Near]:
        """Layouts near one, those first that seem to be the fastest."""
        one, nodes, found = self.options[option], self.orders[order], near(begin, self.tensors, self._stages)
        parallel = one.parallel
        most = min(parallel.global_batch_size // parallel.micro_batch_size, MOST_REPLICAS)
        found = [some for some in found if self._tries(some.layout) and max(some.layout.replicas) <= most]
        many = LayoutBatch.of([some.layout for some in found])
        fine = np.flatnonzero(many.inside_nodes([node.gpus for node in nodes]))
        found = [found[row] for row in fine]
        seconds = Sketches(many.take(fine), nodes, self.names).seconds(
            one, self._work(one), [some.partition for some in found]
        )
        return [found[row] for row in np.argsort(seconds, kind="stable")]

    def other_micro_batches(self, layout: Layout, option: int) -> list[int]:
        """List the numbers of the same options with the next smaller and the next larger micro-batches that every
        replica gets one of."""
        own = self.options[option].parallel
        sizes = {
            one.parallel.micro_batch_size: number
            for number, one in enumerate(self.options)
            if replace(one.parallel, micro_batch_size=own.micro_batch_size) == own
            and max(layout.replicas) * one.parallel.micro_batch_size <= own.global_batch_size
        }
        every = sorted({*sizes, own.micro_batch_size})
        place = every.index(own.micro_batch_size)
        return [sizes[size] for size in every[max(0, place - 1) : place + 2] if size != own.micro_batch_size]

    def places_of(self, plan: Plan) -> list[tuple[int, int]]:
        """The node order of a plan, and the most similar options with which its stages may differ, by their numbers:
        none on other nodes."""
        names = [node.name for node in plan.nodes]
        orders = [number for number, order in enumerate(self.orders) if [node.name for node in order] == names]
        own = plan.training.parallel

        def unlike(number: int) -> tuple[bool, ...]:
            one = self.options[number].parallel
            keys = "micro_batch_size", "recompute", "schedule", "sequence_parallel"
            return *(getattr(one, key) != getattr(own, key) for key in keys), not one.sharded_optimizer

        return [(order, min(range(len(self.options)), key=unlike)) for order in orders[:1] if self.options]

    def _work(self, one: Training) -> Work:
        key = one.parallel.micro_batch_size, one.parallel.recompute
        if key not in self._works:
            self._works[key] = Work(one, self.kinds, self.tensors)
        return self._works[key]

    def _tries(self, layout: Layout) -> bool:
        """Whether its sizes are to be tried."""
        stages, data = self._choices.pipeline, self._choices.data
        return (stages is None or layout.stages in stages) and (data is None or set(layout.replicas) <= {*data})

    def candidate(self, layout: Layout, order: int, option: int) -> Candidate:
        """Build a plan but for its partition; the option by its number."""
        one = self.options[option]
        parallel = one.parallel
        count = parallel.global_batch_size // parallel.micro_batch_size
        alike = len(set(layout.tensors)) == 1
        shares = Shares.even(count, layout.replicas[0]).numbers if layout.even and count % layout.replicas[0] else None
        staged = replace(
            parallel,
            tensor=layout.tensors[0] if alike else layout.tensors,
            data=max(layout.replicas),
            replicas=None if layout.even else layout.replicas,
            pipeline=layout.stages,
            shares=shares,
        )
        return Candidate(replace(one, parallel=staged), self.orders[order], self._work(one), self.names)


def _more(parallel: Parallelism, size: int) -> int:
    """Replicas, so that options of several of them are tried."""
    count = parallel.global_batch_size // size
    return next((data for data in (2, 3) if count % data == 0), 1)


def tensor_sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> list[int]:
    """Those that divide the model, fit into a node, and that every profile of the model has."""
    model = training.model
    measured = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
    shared = [] if model.measured else [model.heads, model.num_query_groups, model.ffn_hidden]
    return [
        size
        for size in range(1, max(kind.gpus for kind in kinds) + 1)
        if all(number is None or number % size == 0 for number in shared)
        and all(known is None or size in known for known in measured)
        and (choices.tensor is None or size in choices.tensor)
    ]
