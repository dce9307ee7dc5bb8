"""A search among plans whose stages differ in replicas (`parallel.replicas`) or tensor sizes (`parallel.tensor`).

First a bound of all layouts on all node orders at once leaves out what cannot be better than the plans that are kept;
the others are looked at for so much work: first those in the node order of the best plan, in each order first those
that promise to be fast, and then those with the lowest bounds. What then may still be better is bounded more closely
(`fasop.search.by_stage.closing`). Work is counted, not timed, so that the same search says the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

import numpy as np

from conf.schema.values.partition import NodeOrder
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.training import Training
from fasop.search.by_stage.bounds.bounded_rows import Row
from fasop.search.by_stage.closing import Effort
from fasop.search.by_stage.layout_climb import BUILT, LayoutClimb, Place
from fasop.search.by_stage.staged_plans import SCHEDULES, StagedPlans
from fasop.search.search import Best
from fasop.search.space.choices import Choices
from megatron_ext.contract.parallel_config import Shards

CLIMB = 0.2
"""The part of the work after which nothing near the best plan is searched."""
OWN_ORDER, OTHER_ORDERS = (0.35, 0.4, 0.7), (0.9, 0.95, 1.0)
"""The parts of the work after which no plan is searched that promises to be fast, none near a fast one, and none that
bounds allow: in the node order of the best plan, and in others."""
ONLY = (*OWN_ORDER[:2], 1.0)
"""The same where there is a single order."""
LAST = 2.0
"""The same once bounds are closer and have led to a faster plan."""


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


class _Options(NamedTuple):
    """Options of a row that have one bound; of two such, those that are looked at first are less."""

    bound: float
    row: Row
    numbers: tuple[int, ...]


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
) -> LayoutClimb | None:
    """Do as `explore_stages` near the plan that is kept, in much less time. Returns the climb, which `go_on` goes on
    with; None if nothing was looked at."""
    if why_not(training, sets[0], choices, effort):
        return None
    nodes = [StagedPlans(training, kinds, choices, effort.layouts) for kinds in sets]
    search = _climbed(nodes, keep, effort, until)
    keep.add([one.plan(partition) for one, partition in search.closing.best])
    return search if search.searched else None


def go_on(search: LayoutClimb, keep: Best) -> None:
    """Hands plans to `keep` that are near others which the climb came upon."""
    search.climb_wider()
    keep.add([one.plan(partition) for one, partition in search.closing.best])


def _climbed(nodes: Sequence[StagedPlans], keep: Best, effort: Effort, until: float) -> LayoutClimb:
    """A search that has climbed from the plans that are kept."""
    search = LayoutClimb(nodes, min((plan.total for plan in keep.plans), default=math.inf), effort, until)
    for best in keep.plans:
        parallel = best.training.parallel
        layers = np.reshape(best.partition.layers, (parallel.chunks, -1)).sum(axis=0).tolist()
        for number, some in enumerate(nodes):
            for order, option in some.places_of(best):
                place = Place(number, order, option, parallel.layout)
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
