"""How others divide the layers, to compare with and to start from. They know no memory: look at `Pipelines.fits`."""

from __future__ import annotations

import numpy as np

from conf.schema.values.partition import Partition
from fasop.compiled import partitions as compiled
from fasop.costs.arrays import Floats, Integers, distinct
from fasop.partition.least_sum import amp_of_heterogeneous_layers
from fasop.partition.local_search import least_largest
from fasop.simulation.linear import TINY, Layers, Linear
from fasop.simulation.pipelines import Pipelines

ROUNDING = 1e-9
"""What is this near below a whole number of layers counts as one."""
MOST_PARTS = 128
"""Parts of a pipeline, at most, whose times compiled loops sum as numpy does."""


def even(pipelines: Pipelines, layers: int) -> Integers:
    """Megatron's split, the same number of layers for every part; where that is none, as even as possible."""
    split = Partition.even(layers, pipelines.parts_count).layers
    return np.repeat(np.array([split]).T, len(pipelines), axis=1)


def minmax(pipelines: Pipelines, layers: int) -> Integers:
    """The heuristic of the public FASOP (HPDC 2024): from the even split, a layer goes from the largest part to the
    smallest for as long as that makes the largest one smaller. Every part keeps a layer, if it had one.
    """
    found = even(pipelines, layers)
    active = np.arange(len(pipelines)) if pipelines.parts_count > 1 else np.arange(0)
    while len(active):
        passes = pipelines.forward.take(active), pipelines.backward.take(active)
        here = found[:, active]
        parts = _both(passes, pipelines.counted(here))
        every = np.arange(len(active))
        source, target = np.argmax(parts, axis=0), np.argmin(parts, axis=0)
        moved, some = here.copy(), here[source, every] > 0
        moved[source, every] -= some
        moved[target, every] += some
        largest = _both(passes, pipelines.counted(moved)).max(axis=0)
        gained = (here[source, every] > 1) & (largest < parts.max(axis=0))
        active = active[gained]
        found[:, active] = moved[:, gained]
    return found


def _both(passes: tuple[Linear, Linear], counted: Layers) -> Floats:
    """[parts, pipelines]: seconds of forward and backward pass."""
    forward, backward = passes
    return forward.of(counted) + backward.of(counted)


def amp(pipelines: Pipelines, layers: int) -> Integers:
    """The partition that AMP's dynamic program finds (Li et al. 2022): the least sum of all parts' times and, for every
    micro-batch after the first, of the largest one.

    Its messages cost the same with every partition, and every part has a layer, embedding or head. Since the layers of
    a part cost the same each, the least sum for a given largest part fills up the parts whose layers are cheapest.
    """
    fixed = pipelines.forward.fixed + pipelines.backward.fixed
    layer = np.maximum(pipelines.forward.layer + pipelines.backward.layer, TINY)
    least = np.zeros(pipelines.parts_count, np.int64)
    if layers >= pipelines.parts_count - 2:
        least[1:-1] = 1
    balanced = least_largest(Linear(fixed=fixed, layer=layer), np.full(fixed.shape, layers), layers)
    lowest = np.maximum(fixed + balanced * layer, fixed + least[:, np.newaxis] * layer).max(axis=0)
    if hasattr(compiled, "least_sums") and pipelines.parts_count <= MOST_PARTS:
        return compiled.least_sums(fixed, layer, least, layers, pipelines.micro_batches, lowest, ROUNDING)
    found = [
        _least_sum(fixed[:, column], layer[:, column], least, layers, pipelines.micro_batches, lowest[column])
        for column in range(len(pipelines))
    ]
    return np.array(found).T


def _least_sum(
    fixed: Floats, layer: Floats, least: Integers, layers: int, micro_batches: int, lowest: float
) -> Integers:
    """`lowest` is the least that the largest part takes; what it may take at most follows from what that gives."""
    most = np.array([lowest])
    if micro_batches > 1:
        shortest = fixed.sum() + layers * layer.min()
        most = (_filled(most, fixed, layer, least, layers, micro_batches)[1] - shortest) / (micro_batches - 1)
    every = (fixed + np.arange(layers + 1)[:, np.newaxis] * layer).ravel()
    some = every >= lowest * (1 - ROUNDING)
    if micro_batches > 1:
        some &= every <= most * (1 + ROUNDING)
    partitions, cost = _filled(distinct(every[some]), fixed, layer, least, layers, micro_batches)
    return partitions[np.argmin(cost)].astype(np.int64)


def _filled(
    largest: Floats, fixed: Floats, layer: Floats, least: Integers, layers: int, micro_batches: int
) -> tuple[Floats, Floats]:
    """[amounts, parts]: the partition with the least sum for each amount of the largest part, and [amounts] its cost;
    infinite where there is none."""
    cheapest = np.argsort(layer, kind="stable")
    amounts = largest[:, np.newaxis]
    whole = np.minimum(layers, np.floor((amounts - fixed) / layer + ROUNDING))
    whole = np.where(fixed + layers * layer <= amounts, layers, whole) - least  # also of layers that take nothing
    room = np.maximum(0, whole[:, cheapest])
    before = np.cumsum(room, axis=1) - room
    partitions = np.empty_like(room)
    partitions[:, cheapest] = np.clip(layers - least.sum() - before, 0, room)
    partitions += least
    times = fixed + partitions * layer
    cost = times.sum(axis=1) + (micro_batches - 1) * times.max(axis=1)
    cost[(whole < 0).any(axis=1) | (partitions.sum(axis=1) < layers)] = np.inf
    return partitions, cost


def start(pipelines: Pipelines, layers: int, balanced: Integers) -> Integers:
    """Where the search for partitions begins: the best of what others do, if it fits, and the smallest largest stage.

    So the partition that is found is never worse than theirs.
    """
    ways = [balanced, minmax(pipelines, layers), even(pipelines, layers)]
    ways += [amp(pipelines, layers) if pipelines.order is None else amp_of_heterogeneous_layers(pipelines, balanced)]
    every, together = np.arange(len(pipelines)), np.tile(np.arange(len(pipelines)), len(ways))
    partitions, lines = np.concatenate(ways, axis=1), pipelines.take(together)
    seconds = np.where(lines.fits(partitions), lines.iteration(partitions), np.inf).reshape(len(ways), -1)
    return np.stack(ways)[np.argmin(seconds, axis=0), :, every].T
