"""The clusters that are left when some nodes of a cluster are not used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from conf.visible import plural
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.memory.amounts import GIB
from fasop.costs.memory.shared_state import parameter_bytes
from fasop.costs.training import Training

MOST = 1000
"""Clusters that are tried; of a cluster with more, the numbers of a group's nodes go up in steps."""

Counts = tuple[int, ...]
"""Nodes by group."""


def step(counts: Sequence[int]) -> int | None:
    """Return by how many nodes the clusters of so many nodes of each group differ: 1 if that does not make too many.

    None: there are too many even with all or none of a group.
    """
    return next((by for by in range(1, max(counts) + 1) if _product(counts, by) - 1 <= MOST), None)


def clusters(kinds: Sequence[NodeKind]) -> list[Sequence[NodeKind]]:
    """Those with some nodes of some groups, the one of all nodes first, then by their number of GPUs.

    Of very many groups only these: some nodes of one group, and of the groups that are better than it all or none, of
    the others none or all. A group is better whose GPUs are faster, or do more for the price.
    """
    counts = [kind.group.count for kind in kinds]
    by = step(counts)
    chosen = set(_ranked(kinds)) if by is None else itertools.product(*(_numbers(count, by) for count in counts))
    found = [
        [_with(kind, count) for kind, count in zip(kinds, some, strict=True) if count] for some in chosen if any(some)
    ]
    return sorted(found, key=lambda some: (-gpus_of(some), [(kind.name, kind.group.count) for kind in some]))


def with_room(training: Training, sets: Sequence[Sequence[NodeKind]], copies: float = 1.0) -> list[Sequence[NodeKind]]:
    """Return those of these clusters whose memory all together has room for so many copies of what the optimizer steps:
    no plan has less than one."""
    if isinstance(training.model, MeasuredModule):
        return [*sets]
    alone = [
        replace(training, parallel=replace(training.parallel, data=1, sharded_optimizer=sharded))
        for sharded in (False, True)
    ]
    least = copies * training.model.parameters() * min(parameter_bytes(one, 1.0).all for one in alone)
    rooms = [sum(kind.group.count * kind.gpus * kind.gpu.memory_gib * GIB for kind in kinds) for kinds in sets]
    return [kinds for kinds, room in zip(sets, rooms, strict=True) if room >= least]


def described(training: Training, kinds: Sequence[NodeKind]) -> str:
    """In words, which clusters of those that `clusters` gives are searched."""
    every = clusters(kinds)
    by, number = step([kind.group.count for kind in kinds]), len(with_room(training, every))
    small = len(every) - number
    room = f" ({small} more cannot hold the model)" if small else ""
    found = f"{plural(number, 'set')} of nodes{room}"
    if by is None:
        return f"{found}, each with at most one incomplete group and no faster nodes left out"
    return found + (f" in steps of {by}" if by > 1 else "")


def _product(counts: Sequence[int], by: int) -> int:
    return math.prod(-(-count // by) + 1 for count in counts)


def _numbers(count: int, by: int) -> list[int]:
    return [*range(0, count, by), count]


def _ranked(kinds: Sequence[NodeKind]) -> Iterator[Counts]:
    """Sets of nodes by two rankings of groups, and those that lack nodes of one group only."""
    counts = [kind.group.count for kind in kinds]
    by = max(1, -(-3 * sum(counts) // MOST))
    speed = [kind.gpus * kind.gpu.fp16_tflops for kind in kinds]
    worth = [fast / (kind.group.price_per_hour or 1.0) for fast, kind in zip(speed, kinds, strict=True)]
    for better in ([fast / kind.gpus for fast, kind in zip(speed, kinds, strict=True)], worth):
        ranked = sorted(range(len(kinds)), key=lambda number: -better[number])
        for place, group in enumerate(ranked):
            for count in _numbers(counts[group], by):
                some = {**{other: counts[other] for other in ranked[:place]}, group: count}
                yield tuple(some.get(number, 0) for number in range(len(kinds)))
    for group, most in enumerate(counts):
        for count in _numbers(most, by):
            yield (*counts[:group], count, *counts[group + 1 :])


def _with(kind: NodeKind, count: int) -> NodeKind:
    return replace(kind, group=replace(kind.group, count=count))
