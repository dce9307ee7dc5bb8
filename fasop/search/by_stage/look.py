"""A search among plans whose stages differ in replicas (`parallel.replicas`) or tensor sizes (`parallel.tensor`).

First a bound of all layouts on all node orders at once leaves out what cannot be better than the plans that are kept;
the others are looked at for so much work: first those in the node order of the best plan, each in the order of their
bounds. What then may still be better is bounded more closely (`fasop.search.by_stage.closing`). Work is counted, not
timed, so that the same search says the same everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

from conf.schema.values.partition import NodeOrder
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.training import Training
from fasop.search.by_stage.closing import Closing, Effort
from fasop.search.by_stage.staged_plans import SCHEDULES, Row, StagedPlans
from fasop.search.search import Best
from fasop.search.space.choices import Choices
from megatron_ext.contract.parallel_config import Shards

BUILT = 4000
"""Work that it takes to find the costs of a layout, in steps of a replay."""
NEAR = 1.2
"""Times the best plan: from a partition that takes longer none is searched."""


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
    nodes = [StagedPlans(training, kinds, choices, effort.layouts) for kinds in sets]
    first = [node.name for node in keep.plans[0].nodes] if keep.plans else []
    work, left, least = 0, 0, math.inf
    closing = Closing(min((plan.total for plan in keep.plans), default=math.inf), effort)
    most = effort.work // BUILT + effort.raised + 2  # of which candidates are built, before there is no work left
    for elsewhere in (False, True):  # what is found in the order of the best plan leaves out most of the others
        rows = list[Row]()
        for number, some in enumerate(nodes):
            names = ([node.name for node in order] for order in some.orders)
            orders = [order for order, own in enumerate(names) if (own != first) == elsewhere]
            for found in some.rows(number, orders, lambda bounds: bounds <= closing.fastest):
                rows += found.every
                least = min(least, found.least)
        # Those without a sharded optimizer that have a sibling with one, which takes less time and memory, come later.
        for later in (False, True):
            every = [*_options(nodes, rows, later=later)]
            nearest = nsmallest(most, every)
            for bound, row, number in ((one.bound, one.row, number) for one in nearest for number in one.numbers):
                build = partial(nodes[row.kinds].candidate, row, number)
                if bound > closing.fastest:
                    least = min(least, bound)
                    continue
                if work > effort.work or time.process_time() > until:
                    closing.put_off(bound, build)
                    left += 1
                    continue
                one = build()
                work += BUILT
                one.rule_out(closing.fastest)
                if one.bound > closing.fastest:
                    least = min(least, one.bound)
                    continue
                partition, seconds, steps = one.search(NEAR * closing.fastest)
                work += steps
                closing.add(one, partition, seconds)
            if len(every) > most:  # no bound of these is less than that of the last one that was put off or left out
                left += sum(len(one.numbers) for one in every if nearest[-1] < one and one.bound <= closing.fastest)
    least = min(least, closing.run(until))
    keep.add([one.plan(partition) for one, partition in closing.best])
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
        left=left,
    )


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
        if shared and not later:
            yield _Options(row.of_sharded, row, shared)
        elif others and bool(shared) == later:
            yield _Options(row.bound, row, others)
