"""Partitions of layers that differ whose parts take least in sum, exactly: a dynamic program over parts and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fasop.compiled import partitions as compiled
from fasop.costs.arrays import Bools, Floats, Integers
from fasop.partition.heterogeneous_layers import both_of_parts, memory_left, memory_taken, of_first_layers
from fasop.simulation.linear import TINY
from fasop.simulation.pipelines import Pipelines

LARGEST = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, np.inf)
"""Times the least possible one: what the largest part may take."""
ROUNDING = 1e-9
"""The part of a limit by which a part may exceed it."""


def least_sum(costs: Floats, memory: Floats, room: Floats, most: Sequence[Floats]) -> tuple[Integers, Floats]:
    """[limits, parts, pipelines], and the sums [limits, pipelines], infinite where no partition keeps to the limits.

    Args:
        costs: [layers + 1, parts, pipelines]: what the first layers take, on each part.
        memory: likewise.
        room: [parts, pipelines]: the memory of each part.
        most: of each limit [parts, pipelines], what a part may take.
    """
    if hasattr(compiled, "least_sum"):
        return compiled.least_sum(costs, memory, _limit(room), _limit(np.stack(most)))
    layers, parts, columns = costs.shape[0] - 1, *costs.shape[1:]
    cuts, every = np.arange(layers + 1), np.arange(columns)
    behind = cuts[:, np.newaxis, np.newaxis] > cuts[:, np.newaxis]
    value = np.full((len(most), layers + 1, columns), np.inf)
    value[:, 0] = 0
    came = np.zeros((len(most), parts, layers + 1, columns), np.int64)
    for part in range(parts):
        takes = costs[:, part] - costs[:, np.newaxis, part]
        takes[behind | (memory[:, part] - memory[:, np.newaxis, part] > _limit(room[part]))] = np.inf
        for number, limit in enumerate(most):
            through = np.where(takes > _limit(limit[part]), np.inf, value[number][:, np.newaxis] + takes)
            came[number, part] = begin = through.argmin(axis=0)
            value[number] = np.take_along_axis(through, begin[np.newaxis], axis=0)[0]
    found = np.zeros((len(most), parts, columns), np.int64)
    for number in range(len(most)):
        end = np.full(columns, layers)
        for part in range(parts - 1, -1, -1):
            begin = came[number, part, end, every]
            found[number, part], end = end - begin, begin
    return found, value[:, layers]


def least_sum_of_steps(steps: Bools, costs: Floats, behind: Floats) -> tuple[Integers, float]:
    """[parts, 1] and the sum, of a single pipeline; infinite where there is no partition of these steps.

    Args:
        steps: [parts, layers + 1, layers + 1]: whether a part may have the layers from one cut to another one.
        costs: [layers + 1, parts]: what the first layers take, on each part.
        behind: [layers + 1, parts]: what a cut takes that comes behind a part.
    """
    parts, cuts = len(steps), len(costs)
    value, came = np.where(np.arange(cuts), np.inf, 0.0), np.zeros((parts, cuts), np.int64)
    for part in range(parts):
        through = np.where(steps[part], (value - costs[:, part])[:, np.newaxis], np.inf)
        came[part] = through.argmin(axis=0)
        value = through[came[part], np.arange(cuts)] + costs[:, part] + behind[:, part]
    found, end = np.zeros((parts, 1), np.int64), cuts - 1
    for part in range(parts - 1, -1, -1):
        found[part], end = end - came[part, end], came[part, end]
    return found, float(value[-1])


def _limit(most: Floats) -> Floats:
    return most + ROUNDING * np.abs(most)


def amp_of_heterogeneous_layers(pipelines: Pipelines, balanced: Integers) -> Integers:
    """Do as `fasop.partition.baselines.amp`, but for layers that differ, within memory, and with some limits to the
    largest part. `balanced` is from `bottleneck`, and returned where nothing is better."""
    both = both_of_parts(pipelines)
    least = both.of(pipelines.counted(balanced)).max(axis=0)
    limits = [factor * np.maximum(least, TINY) - both.fixed for factor in LARGEST]
    memory, room = memory_taken(pipelines), memory_left(pipelines)
    found, sums = least_sum(of_first_layers(pipelines, both.layer), memory, room, limits)
    best, cost = balanced, _cost(pipelines, balanced)
    for one, possible in zip(found, np.isfinite(sums), strict=True):
        taken = np.where(possible, _cost(pipelines, one), np.inf)
        best, cost = np.where(taken < cost, one, best), np.minimum(taken, cost)
    return best


def _cost(pipelines: Pipelines, partitions: Integers) -> Floats:
    """[pipelines]: seconds of all parts and, for every micro-batch after the first, of the largest one."""
    parts = both_of_parts(pipelines).of(pipelines.counted(partitions))
    return parts.sum(axis=0) + (pipelines.micro_batches - 1) * parts.max(axis=0)
