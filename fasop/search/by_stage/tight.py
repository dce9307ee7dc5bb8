"""Plans that compute layers again for want of memory. Where only some of their layers need to be, they may be the
fastest of all, though a search that ranks them with all layers computed again comes upon many that are faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import numpy as np

from fasop.frozen import replace
from fasop.partition.local_search import bottleneck
from fasop.search.order_search import Bounded, search_partitions
from fasop.search.plan import Plan
from fasop.search.search import plans_of
from fasop.search.space.candidates import Candidates, Space
from fasop.simulation.nodes import Nodes
from fasop.simulation.replica_pipelines import by_replica
from megatron_ext.contract.parallel_config import Recompute

SIZES, GROUPS = 30, 60
"""Sizes that are looked at, and groups of their orders in which nodes have the same numbers of GPUs in each place, at
most."""
PROMISING = 0.98
"""What moving layers makes at best of the time that such a plan would take with nothing computed again."""
PASSES = 2**11
"""Parts times micro-batches: plans with more take too long to simulate stage by stage."""


def tight_plans(spaces: Sequence[Space], fastest: float, until: float) -> list[Plan]:
    """List a plan of each of the sizes and schedules that do not fit in some order unless they compute layers again,
    and that may take less than `fastest` seconds if nothing were: the most promising first. Nothing is begun after so
    many CPU seconds of this process."""
    rows = list[tuple[float, int, int]]()
    for place, space in enumerate(spaces):
        if time.process_time() > until:
            break
        space.raise_known(lambda seconds: seconds < fastest)
        known = space.known_of_some
        rows += [(float(known[number]), place, number) for number in np.flatnonzero(known < fastest).tolist()]
    promising = ((place, number) for _, place, number in sorted(rows) if _may_gain(spaces[place], number))
    found, groups = list[tuple[float, Plan]](), 0
    for place, number in islice(promising, SIZES):
        if groups >= GROUPS or time.process_time() > until:
            break
        for group in spaces[place].built(number, spaces[place].first):
            groups += 1
            ways = [group.training(column).parallel.recompute.way for column in range(len(group))]
            again = [column for column, way in enumerate(ways) if way is Recompute.full]
            if again and group.pipelines.parts_count * group.pipelines.micro_batches <= PASSES:
                found += _best(group.take(np.array(again)), fastest)
    return [plan for _, plan in sorted(found, key=lambda row: row[0])]


def _may_gain(space: Space, number: int) -> bool:
    """Whether such sizes may compute layers again, and have stages that could do so unlike, and replicas for ZeRO."""
    options = [one.parallel for one in space.options(number)]
    again = any(one.recompute.way is Recompute.full for one in options)
    return again and options[0].pipeline > 1 and (options[0].data > 1 or not options[0].zero)


def _best(group: Candidates, fastest: float) -> list[tuple[float, Plan]]:
    """The one that is fastest balanced, with the seconds that it would take with nothing computed again; none if that
    is too long, or if it would fit."""
    balanced = bottleneck(group.pipelines, group.layers)
    quickest = np.array([np.argmin(group.pipelines.iteration(balanced))])
    group, balanced = group.take(quickest), balanced[:, quickest]
    training = group.training(0)
    free = replace(training, parallel=replace(training.parallel, recompute=Recompute.none))
    lines = by_replica(free, Nodes(group.kinds, group.orders))
    seconds = float(lines.iteration(balanced)[0])
    if PROMISING * seconds >= fastest or (lines.held(balanced) <= lines.capacity).all():
        return []
    one = Bounded.of(group)
    (plan,) = plans_of(group, search_partitions(one)[0], one.proved)
    return [(seconds, plan)]
