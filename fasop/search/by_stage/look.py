"""A search among plans whose stages differ in replicas (`parallel.replicas`) or tensor sizes (`parallel.tensor`).

First a bound of all layouts on all node orders at once leaves out what cannot be better than the plans that are kept;
the others are looked at for so much work: first those in the node order of the best plan, each in the order of their
bounds. Of those for which there is no work left, the bounds that are lowest are raised. Work is counted, not timed, so
that the same search says the same everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heapreplace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conf.schema.values.partition import NodeOrder, Shares
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.layers import measured_tensor_sizes
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.search.by_stage.bounds import Work, sized
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.layout_batch import LayoutBatch
from fasop.search.by_stage.layout_bounds import PlacedLayouts
from fasop.search.by_stage.layouts import Layouts, layouts
from fasop.search.search import Best
from fasop.search.space import node_orders
from fasop.search.space.candidates import MOST_REPLICAS, divisors
from fasop.search.space.choices import SEARCHED, Choices
from fasop.simulation.on_nodes import times_on
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Recompute, Shards

SCHEDULES = tuple(schedule for schedule in SEARCHED if not schedule.definition.has_chunks)
"""Those of stages with unlike numbers of replicas."""
STAGES = (0, 5, 10, 20, 2**31)
"""Layouts of which bounds are found together have numbers of stages between these."""
BOUNDS = (
    *(PlacedLayouts.shortest_trip, PlacedLayouts.trip_in_parts),
    *(PlacedLayouts.least_seconds, PlacedLayouts.trip_seconds),
)
"""Bound many layouts, each of them those that the ones before leave."""
BUILT = 4000
"""Work that it takes to find the costs of a layout, in steps of a replay."""
NEAR = 1.2
"""Times the best plan: from a partition that takes longer none is searched."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is looked at."""

    layouts: int
    """At most, on one set of nodes."""
    work: int
    """Steps of replays."""
    gpus: int
    """In a cluster of more GPUs nothing is looked at."""
    near: float
    """The part of the best plan's time up to which bounds are raised of what was not looked at."""
    raised: int
    """How many bounds are raised, at most."""


QUICK = Effort(layouts=2500, work=400_000, gpus=256, near=0.95, raised=60)
WHOLE = Effort(layouts=40_000, work=2_500_000, gpus=1024, near=1.0, raised=600)


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


class _Row(NamedTuple):
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


class _Option(NamedTuple):
    """One option of a row; of two, the one that is looked at first is less."""

    elsewhere: bool
    """Whether its node order is not the one of the best plan."""
    later: bool
    """Whether it has a sibling with a sharded optimizer, which takes less time and less memory."""
    bound: float
    row: _Row
    number: int


class _Rows(NamedTuple):
    least: float
    """The least bound of those that are not worth it."""
    every: list[_Row]


class _Costs(NamedTuple):
    """What the bounds of options depend on."""

    micro_batch_size: int
    recompute: Recompute
    halves: bool
    """Whether backward passes are in two parts."""

    @classmethod
    def of(cls, parallel: Parallelism) -> _Costs:
        return cls(parallel.micro_batch_size, parallel.recompute, parallel.schedule.definition.splits_backward)


class _Nodes:
    """All layouts on all orders of some nodes."""

    def __init__(self, training: Training, kinds: Sequence[NodeKind], choices: Choices, most: int) -> None:
        self.kinds = [kind for kind in kinds if kind.group.count]
        self.names = [kind.name for kind in self.kinds]
        self._training, self._choices = training, choices
        gpus = [kind.gpus for kind in self.kinds]
        self.tensors = tensor_sizes(training, self.kinds, choices)
        self.every = Layouts((), "")
        if self.tensors:
            room = math.gcd(*gpus)
            stages = min(training.blocks.most_stages, gpus_of(self.kinds))
            self.every = layouts(gpus_of(self.kinds), room, self.tensors, stages, most)
        self.wanted = [layout for layout in self.every.every if _tries(choices, layout)]
        self.many = LayoutBatch.of(self.wanted)
        self.orders = self._orders() if self.wanted else []
        self.options = [*self._options()] if self.wanted else []
        self.works: dict[tuple[object, ...], Work] = {}

    def _orders(self) -> list[list[NodeKind]]:
        counts = [kind.group.count for kind in self.kinds]
        if node_orders.few(counts):
            found = node_orders.orders(counts).tolist()
        else:
            one = sized(self._training, self.tensors[0])
            times = [times_on(kind, one).layers for kind in self.kinds]
            fastest = sorted(range(len(times)), key=lambda kind: sum(t.forward + t.backward for t in times[kind]))
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

    def rows(self, number: int, worth: Callable[[Floats], NDArray[np.bool_]]) -> Iterator[_Rows]:
        """Those that are worth it, by their bounds, and for each group of options and order the least of the others."""
        batch, groups = self._training.parallel.global_batch_size, dict[_Costs, list[int]]()
        for option, one in enumerate(self.options):
            groups.setdefault(_Costs.of(one.parallel), []).append(option)
        every = []
        for costs, numbers in sorted(groups.items(), key=lambda row: row[0].recompute is not Recompute.none):
            first = {self.options[option].parallel.sharded_optimizer: self.options[option] for option in numbers[::-1]}
            one = first.get(False) or first[True]
            self.works[costs[:2]] = self.works.get(costs[:2]) or Work(one, self.kinds, self.tensors)
            every.append((costs, tuple(numbers), one, int(min(first)), int(max(first))))
        inside = {
            gpus: self.many.inside_nodes(gpus) for gpus in {tuple(n.gpus for n in nodes) for nodes in self.orders}
        }
        for (order, nodes), (low, high) in product(enumerate(self.orders), pairwise(STAGES)):
            fits = inside[tuple(node.gpus for node in nodes)]
            some = np.nonzero(fits & (self.many.last >= low) & (self.many.last < high))[0]
            placed, most = PlacedLayouts(self.many.take(some), nodes, self.names), self.many.replicas[some].max(axis=1)
            known: dict[tuple[object, ...], Floats] = {}
            for costs, options, one, whole, sharded in every:
                work = self.works[costs[:2]]
                fine = most <= min(batch // costs.micro_batch_size, MOST_REPLICAS)
                bounds = known.get(costs[::2], np.zeros((2, len(some)))).copy()
                lowest = bounds[sharded]  # where a sharded optimizer is tried, with that
                for bound in BOUNDS:
                    if len(near := np.nonzero(fine & worth(lowest))[0]):
                        of_near = placed if len(near) == len(some) else placed.take(near)
                        bounds[:, near] = np.maximum(bounds[:, near], bound(of_near, one, work))
                if costs.recompute is Recompute.none:
                    known[costs[::2]] = bounds  # to compute again takes no less
                kept = fine & worth(lowest)
                rows = zip(bounds[whole, kept].tolist(), some[kept].tolist(), lowest[kept].tolist(), strict=True)
                yield _Rows(
                    float(lowest[fine & ~kept].min(initial=math.inf)),
                    [_Row(bound, number, order, options, place, other) for bound, place, other in rows],
                )

    def candidate(self, option: _Option) -> Candidate:
        one, layout = self.options[option.number], self.wanted[option.row.layout]
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
        work = self.works[parallel.micro_batch_size, parallel.recompute]
        return Candidate(replace(one, parallel=staged), self.orders[option.row.order], work, self.names)


def _more(parallel: Parallelism, size: int) -> int:
    """Replicas, so that options of several of them are tried."""
    count = parallel.global_batch_size // size
    return next((data for data in (2, 3) if count % data == 0), 1)


def tensor_sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> list[int]:
    """Those that divide the model, fit into a node, and that every profile of the model has."""
    model = training.model
    measured = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
    shared = [model.heads, model.num_query_groups, model.ffn_hidden]
    return [
        size
        for size in range(1, max(kind.gpus for kind in kinds) + 1)
        if all(number is None or number % size == 0 for number in shared)
        and all(known is None or size in known for known in measured)
        and (choices.tensor is None or size in choices.tensor)
    ]


def _tries(choices: Choices, layout: Layout) -> bool:
    """Whether its sizes are to be tried."""
    stages, data = choices.pipeline, choices.data
    return (stages is None or layout.stages in stages) and (data is None or set(layout.replicas) <= {*data})


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
    nodes = [_Nodes(training, kinds, choices, effort.layouts) for kinds in sets]
    rows, least = list[_Row](), math.inf
    for number, some in enumerate(nodes):
        for found in some.rows(number, partial(keep.worth, some.kinds)) if some.wanted else ():
            rows += found.every
            least = min(least, found.least)
    first = [node.name for node in keep.plans[0].nodes] if keep.plans else []
    work, put_off = 0, list[_Option]()
    fastest, fast, unproved = _fastest(keep), list[tuple[Candidate, Integers]](), list[Candidate]()
    for option in sorted(_options(nodes, rows, first)):
        if option.bound > fastest:
            least = min(least, option.bound)
            continue
        if work > effort.work or time.process_time() > until:
            put_off.append(option)
            continue
        one = nodes[option.row.kinds].candidate(option)
        work += BUILT
        one.rule_out(fastest)
        if one.bound > fastest:
            least = min(least, one.bound)
            continue
        partition, seconds, steps = one.search(NEAR * fastest)
        work += steps
        if one.exhausted:
            least = min(least, seconds)
        else:
            unproved.append(one)
        if math.isfinite(seconds) and seconds <= fastest:
            fast = [*(fast if seconds == fastest else ()), (one, partition)]
            fastest = seconds
    for one, _ in fast:
        one.tighten(fastest)
    keep.add([one.plan(partition) for one, partition in fast])
    least = min(least, _tightened(unproved, fastest))
    enough = min(least, effort.near * fastest)
    least = min(least, _raised(nodes, put_off, enough, effort.raised, until))
    said = " and ".join(dict.fromkeys(some.every.said for some in nodes if some.wanted))
    count = sum(len(some.wanted) for some in nodes)
    where = " and ".join(
        str(NodeOrder(tuple(kind.name for kind in some.kinds for _ in range(kind.group.count))))
        for some in nodes
        if some.wanted
    )
    if not count:
        return None
    return Looked(
        said=said,
        nodes=where,
        layouts=count,
        orders=sum(len(some.orders) for some in nodes),
        schedules=", ".join(schedule.label for schedule in choices.schedule if schedule in SCHEDULES),
        least=least,
        left=len(put_off),
    )


def _options(nodes: Sequence[_Nodes], rows: Sequence[_Row], first: Sequence[str]) -> Iterator[_Option]:
    """All options of rows; those in the node order `first` are the first ones."""
    for row in rows:
        some = nodes[row.kinds]
        elsewhere = [node.name for node in some.orders[row.order]] != first
        shares = [some.options[number].parallel.sharded_optimizer for number in row.numbers]
        for number, shared in zip(row.numbers, shares, strict=True):
            yield _Option(elsewhere, any(shares) and not shared, row.of_sharded if shared else row.bound, row, number)


def _tightened(unproved: Sequence[Candidate], limit: float) -> float:
    """Seconds below which none of these candidates is. Only those with the lowest bounds are tightened: they decide."""
    bounds = [(one.bound, number) for number, one in enumerate(unproved)]
    heapify(bounds)
    tightened = set[int]()
    while bounds and bounds[0][1] not in tightened:
        number = bounds[0][1]
        tightened.add(number)
        unproved[number].tighten(limit)
        heapreplace(bounds, (unproved[number].bound, number))
    return bounds[0][0] if bounds else math.inf


def _raised(nodes: Sequence[_Nodes], options: Sequence[_Option], enough: float, most: int, until: float) -> float:
    """Seconds below which no plan of these options is. Those with the lowest bounds, so many at most, are bounded by
    all their own costs, until the least is `enough`."""
    least = math.inf
    for number, option in enumerate(sorted(options, key=lambda option: option[2:])):
        if option.bound >= min(enough, least) or number == most or time.process_time() > until:
            return min(least, option.bound)
        one = nodes[option.row.kinds].candidate(option)
        one.tighten(enough)
        least = min(least, max(option.bound, one.bound))
    return least


def _fastest(keep: Best) -> float:
    return min((plan.total for plan in keep.plans), default=math.inf)
