"""How much shorter an iteration with any partition could be at most where layers differ: by paths and mixed partitions.

Every path of waits takes a time that is linear in the layers of each kind on each part. Of any mean of paths the least
over all partitions is found exactly (`fasop.partition.least_sum`), and no partition takes less. The mean for which that
is largest comes from a linear program over the paths and the partitions that are known, of which it mixes some; this
mixture, and the partition that is best for the mean of paths, give further paths (Dantzig and Wolfe 1960).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.partition.least_sum import least_sum
from fasop.partition.linear_program import LeastLargest
from fasop.partition.unlike_layers import memory_taken, of_first_layers, stage_room
from fasop.simulation.linear import Layers
from fasop.simulation.pipelines import Pipelines

ROUNDS = 60
"""Linear programs, at most: work is counted, not timed, so that the same search says the same everywhere."""
CLOSE = 1e-6
"""The part of an iteration by which a bound may stay below the seconds of the best partition."""


def proved_of_unlike(one: Pipelines, begin: Integers) -> tuple[Integers, float, float]:
    """The best partition that is found on the way, from `begin` [parts, 1], which fits; its seconds; and the bound."""
    assert one.order is not None
    assert one.shares is not None
    paths = _with_shortest_messages(one.unhidden(one.order.layers))
    least = replace(one, shares=one.shares.min(axis=0, keepdims=True))  # of moments: nothing that fits is lost
    memory, room = memory_taken(least), stage_room(one)
    free = [np.full(room.shape, np.inf)]
    best, seconds, bound = begin, float(one.iteration(begin)[0]), 0.0
    known, counts = [begin], [one.counted(begin)]
    slopes, constants = list[Floats](), list[float]()

    def cut(count: Layers) -> None:
        slope, taken = paths.longest(count)
        slopes.append(slope)
        constants.append(float(taken[0] - (slope * count).sum()))

    cut(counts[0])
    for _ in range(ROUNDS):
        weights, shares = _weights(counts, slopes, constants)
        mean = np.tensordot(weights, np.stack(slopes), axes=1)
        found, sums = least_sum(of_first_layers(one, mean), memory, room, free)
        bound = max(bound, float(weights @ constants + sums[0, 0]))
        if one.fits(found[0])[0] and (now := float(one.iteration(found[0])[0])) < seconds:
            best, seconds = found[0], now
        if bound >= seconds * (1 - CLOSE):
            break
        cut(np.tensordot(shares, np.stack(counts), axes=1))
        if not any((found[0] == other).all() for other in known):
            known.append(found[0])
            counts.append(one.counted(found[0]))
            cut(counts[-1])
    return best, seconds, min(bound, seconds)


def _with_shortest_messages(one: Pipelines) -> Pipelines:
    """For numbers of layers by kind, which need not be a partition."""
    replicas = tuple(replace(own, lines=_with_shortest_messages(own.lines)) for own in one.replicas)
    return replace(one, order=None, shares=None, replicas=replicas)


def _weights(counts: list[Layers], slopes: list[Floats], constants: list[float]) -> tuple[Floats, Floats]:
    """[paths]: the mean that takes longest with the known partitions, of which any mixture may be made; and that
    mixture, [partitions]."""
    each = np.tensordot(np.stack(slopes), np.stack(counts), ([1, 2, 3], [1, 2, 3]))
    takes = np.array(constants)[:, np.newaxis] + each
    problem = LeastLargest(1, len(counts))
    problem.cut(takes, np.zeros(len(takes)))
    ones = np.ones(len(counts), np.int64)
    solved = problem.solve(problem.root(0 * ones, ones))
    weights, active = np.zeros(len(takes)), solved.node.active - 2 * len(counts)
    weights[active[active >= 0]] = np.maximum(0.0, solved.node.inverse[-1, :-1][active >= 0])
    return weights / weights.sum(), np.maximum(0.0, solved.amounts)
