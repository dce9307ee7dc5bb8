"""How many layers each stage gets: the smallest largest stage, exactly, and the shortest iteration, by search.

Everything works on many pipelines at once; partitions are [parts, pipelines], with one part to a stage or several
chunks. Memory is part of the problem: no stage ever gets more layers than its `capacity`. A stage may have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import partitions as compiled
from fasop.costs.arrays import Floats, Integers
from fasop.partition.chains import both_passes, with_one_more
from fasop.partition.climbing import climb_of
from fasop.partition.heterogeneous_layers import (
    cuts_elsewhere,
    fitting,
    gains,
    least_largest_part,
    passes_with_one_more,
)
from fasop.simulation.linear import TINY, Linear
from fasop.simulation.pipelines import Pipelines

FEW = 2000
"""Partitions of a pipeline that are all tried: that takes no longer than a search among them."""
CELLS = 2**22
"""Parts times pipelines that are simulated together, at most; for memory's sake."""
REACH = (0.2, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.55, 0.6)
"""What moving layers leaves, at best, of the seconds by which a partition is above its bound: at first, after one move,
and so on; after more moves as after the last. (Of 999 searches of a front one in a hundred left less than 0.27, 0.37,
0.40, 0.43, 0.50, 0.53, 0.58, 0.61, 0.59 and 0.57. With the first three half as much again the plans of two rooms lose
4 %.)"""

Worth = Callable[[Floats], NDArray[np.bool_]]
"""Whether such seconds of each pipeline would be of use; if not, more would not be."""


def feasible(pipelines: Pipelines, layers: int) -> NDArray[np.bool_]:
    """[pipelines]: whether any partition of so many layers fits."""
    if pipelines.order is not None:
        return fitting(pipelines)
    fits: NDArray[np.bool_] = np.all(pipelines.capacity >= 0, axis=0)
    fits &= np.minimum(pipelines.capacity, layers).sum(axis=0) >= layers
    return fits


def bottleneck(pipelines: Pipelines, layers: int) -> Integers:
    """The partitions whose largest stage time, forward and backward, is least; see `least_largest`.

    Chunks of a stage share its layers as evenly as possible, the first ones getting one more. Where layers differ:
    `least_largest_part`.
    """
    if pipelines.order is not None:
        return least_largest_part(pipelines)
    held = least_largest(both_passes(pipelines), pipelines.capacity, layers)
    chunks = pipelines.parts_count // pipelines.stages
    return np.concatenate([(held + chunks - 1 - chunk) // chunks for chunk in range(chunks)])


def least_largest(costs: Linear, capacity: Integers, layers: int) -> Integers:
    """The partitions whose largest cost of a stage is least.

    Each layer in turn goes to the stage that then costs least of all that have room. That is optimal, since costs
    only grow with the layers (Ibaraki and Katoh 1988, resource allocation with a minimax objective): any other
    partition has a stage with at least as many layers as the largest stage has here. All pipelines must be `feasible`.
    The first of equal stages wins.
    """
    costs = Linear(fixed=costs.fixed, layer=np.maximum(costs.layer, TINY))
    if hasattr(compiled, "least_largest"):
        return compiled.least_largest(costs.fixed, costs.layer, capacity, layers)
    fixed, growth, every = costs.fixed, costs.layer, np.arange(costs.fixed.shape[1])
    given = _below_level(costs, capacity, layers)
    after = np.where(given < capacity, fixed + (given + 1) * growth, np.inf)
    left = layers - given.sum(axis=0)
    while left.any():
        columns = every[left > 0]
        stage = np.argmin(after[:, columns], axis=0)
        given[stage, columns] += 1
        left[columns] -= 1
        now = given[stage, columns]
        next_cost = fixed[stage, columns] + (now + 1) * growth[stage, columns]
        after[stage, columns] = np.where(now < capacity[stage, columns], next_cost, np.inf)
    return given


def _below_level(costs: Linear, capacity: Integers, layers: int) -> Integers:
    """The layers that stages get before any costs more than all would if layers had parts: a head start."""
    level = (layers + (costs.fixed / costs.layer).sum(axis=0)) / (1 / costs.layer).sum(axis=0)
    given: Integers = np.clip(np.floor((level - costs.fixed) / costs.layer), 0, capacity).astype(np.int64)
    given[:, given.sum(axis=0) > layers] = 0
    return given


def largest_stage(pipelines: Pipelines, partitions: Integers) -> Floats:
    """[pipelines]: seconds of the largest stage's forward and backward pass."""
    return both_passes(pipelines).of(pipelines.held(partitions)).max(axis=0)


def shortest(
    pipelines: Pipelines, layers: int, begin: Integers, worth: Worth | None = None, least: Floats | float = 0.0
) -> tuple[Integers, Floats]:
    """The partitions with the shortest iterations, and their seconds: of all where they are few, else `improved`."""
    parts = pipelines.parts_count
    if partition_count(layers, parts) <= FEW:
        return exhaustive(pipelines, layers)
    return (improved if pipelines.order is None else improved_by_cuts)(pipelines, begin, worth, least)


def improved_by_cuts(
    pipelines: Pipelines, begin: Integers, worth: Worth | None = None, least: Floats | float = 0.0
) -> tuple[Integers, Floats]:
    """Do as `improved`, and then move single cuts further, for as long as one of the two gains.

    Where layers differ, so do messages: what a cut gains a few layers further need not be gained on the way.
    Of equal ones the first wins, by the layers of its parts.
    """
    found, times = improved(pipelines, begin, worth, least)
    active = np.arange(len(pipelines) if pipelines.parts_count > 1 else 0)
    if worth is not None:
        active = active[worth(_reach(times, least, moves=2))[active]]
    while len(active):
        lines, here, before = pipelines.take(active), found[:, active], times[active]
        owner, near = cuts_elsewhere(lines, here, before)
        if not len(owner):
            break
        own = lines.take(owner)
        seconds = np.where(own.fits(near), own.iteration(near, before[owner]), np.inf)
        first = np.lexsort((*near[::-1], seconds, owner))
        best = first[np.unique(owner[first], return_index=True)[1]]
        best = best[seconds[best] < before[owner[best]]]
        active = active[owner[best]]
        if len(active):
            found[:, active], times[active] = improved(pipelines.take(active), near[:, best])
    return found, times


def partition_count(layers: int, parts: int) -> int:
    """How many ways there are to share out so many layers in a row."""
    return math.comb(layers + parts - 1, layers)


def exhaustive(pipelines: Pipelines, layers: int) -> tuple[Integers, Floats]:
    """The best of all partitions that fit, each simulated, and their seconds; for few parts. All must be `feasible`."""
    parts, many = pipelines.parts_count, len(pipelines)
    found, times = np.zeros((parts, many), np.int64), np.full(many, np.inf)
    every = combinations(range(layers + parts - 1), parts - 1)
    while bars := list(islice(every, max(1, CELLS // (parts * many)))):
        table = between_bars(np.array(bars, np.int64).reshape(len(bars), -1), layers)
        lines = pipelines.take(np.repeat(np.arange(many), len(bars)))
        columns = np.tile(table, (1, many))
        seconds = np.where(lines.fits(columns), lines.iteration(columns), np.inf).reshape(many, -1)
        best = np.argmin(seconds, axis=1)
        taken = seconds[np.arange(many), best]
        better = taken < times
        found[:, better], times[better] = table[:, best[better]], taken[better]
    return found, times


def between_bars(bars: Integers, layers: int) -> Integers:
    """[parts, partitions]: of layers in a row, those between the bars whose places are given."""
    first = np.full((len(bars), 1), -1)
    last = np.full((len(bars), 1), layers + bars.shape[1])
    return (np.diff(np.hstack([first, bars, last])) - 1).T


def improved(
    pipelines: Pipelines, partitions: Integers, worth: Worth | None = None, least: Floats | float = 0.0
) -> tuple[Integers, Floats]:
    """Moves one layer from any part to any other for as long as that shortens the iteration, the best move first.

    Only moves from a steeper part to a less steep one can (`Pipelines.slopes`). Of them the most promising are tried
    first, and more of the others each time if none of those gains. Returns the partitions reached, and their seconds.
    Of equal moves the most promising wins, and of those the first. A pipeline, none of whose partitions takes less than
    its `least` seconds, is left as it is once nothing that it may reach (`REACH`) is of `worth`; without, none is.
    """
    found, times, climb = partitions.copy(), pipelines.iteration(partitions), climb_of(pipelines)
    parts = len(found)
    pairs = np.argwhere(~np.eye(parts, dtype=bool))
    first = min(2 * parts, len(pairs))
    active, moves = np.arange(len(pipelines)), 0
    while len(active) and len(pairs):
        if worth is not None:
            active = active[worth(_reach(times, least, moves))[active]]
        if climb is not None:
            active, moves = active[climb.move(found, times, active)], moves + 1
            continue
        gained = np.zeros(len(active), bool)
        batch = max(1, CELLS // (parts * len(pairs)))
        for begin in range(0, len(active), batch):
            here = np.arange(begin, min(begin + batch, len(active)))
            now = active[here]
            ranked, promising = _ranked(pipelines.take(now), found[:, now], times[now], pairs)
            for places in _growing(first, len(pairs)):
                left = np.nonzero(~gained[here])[0]
                if not len(left):
                    break
                if not promising[left, places].any():
                    continue
                columns = active[here[left]]
                tried = pairs[ranked[left, places]], promising[left, places]
                moved, taken = _tried(pipelines.take(columns), found[:, columns], *tried, times[columns])
                better = taken < times[columns]
                found[:, columns[better]], times[columns[better]] = moved[:, better], taken[better]
                gained[here[left[better]]] = True
        active, moves = active[gained], moves + 1
    return found, times


def _reach(times: Floats, least: Floats | float, moves: int) -> Floats:
    """[pipelines]: the seconds that they may still reach after so many moves."""
    return least + REACH[min(moves, len(REACH) - 1)] * (times - least)


def _growing(first: int, whole: int) -> list[slice]:
    """All of so many places, in parts: that many first, and then twice as many as before."""
    ends = [0, first]
    while ends[-1] < whole:
        ends.append(min(3 * ends[-1], whole))
    return [slice(a, b) for a, b in pairwise(ends)]


def _ranked(
    pipelines: Pipelines, partitions: Integers, seconds: Floats, pairs: Integers
) -> tuple[Integers, NDArray[np.bool_]]:
    """[pipelines, pairs]: the moves from the most to the least promising, and whether each could gain and fits.

    `seconds` are what the partitions take. A move that makes the longest path shorter cannot gain where the stage that
    gets the layer is not done by then.
    """
    source, target = pairs.T
    if pipelines.order is not None:
        gain = gains(pipelines, partitions, pipelines.slopes(partitions, seconds), pairs)
        in_time = passes_with_one_more(pipelines, partitions, pairs) < seconds[:, np.newaxis]
        gain = np.where(partitions[source].T > 0, gain, -1.0)
        order = np.argsort(-gain, axis=1, kind="stable")
        return order, np.take_along_axis((gain > 0) & in_time, order, axis=1)
    slopes = pipelines.slopes(partitions, seconds).T
    gain = slopes[:, source] - slopes[:, target]
    there, stages = target % pipelines.stages, pipelines.stages
    room = (pipelines.held(partitions) < pipelines.capacity)[there] | (source % stages == there).reshape(-1, 1)
    possible = (partitions[source] > 0) & room
    gain = np.where(possible.T, gain, -1.0)
    order = np.argsort(-gain, axis=1, kind="stable")
    in_time = with_one_more(pipelines, partitions)(pairs) < seconds[:, np.newaxis]
    in_time[:, source % stages == there] = True
    return order, np.take_along_axis((gain > 0) & in_time, order, axis=1)


def _tried(
    pipelines: Pipelines, partitions: Integers, pairs: Integers, promising: NDArray[np.bool_], limits: Floats
) -> tuple[Integers, Floats]:
    """The best neighbour of each partition, and its seconds; infinite where no move is promising.

    `pairs` are [pipelines, moves, 2], from which part to which. Where no neighbour is below the limit it may be any of
    them, and its seconds too few, but not below the limit.
    """
    every = np.arange(len(pipelines))
    if not promising.any():
        return partitions, np.full(len(every), np.inf)
    owner, move = np.nonzero(promising)
    seconds = np.full(promising.shape, np.inf)
    source, target = pairs[owner, move].T
    near, many, lines = partitions[:, owner], np.arange(len(owner)), pipelines.take(owner)
    near[source, many] -= 1
    near[target, many] += 1
    seconds[owner, move] = np.where(lines.fits(near), lines.iteration(near, limits[owner]), np.inf)
    best = np.argmin(seconds, axis=1)
    moved = partitions.copy()
    source, target = pairs[every, best].T
    moved[source, every] -= 1
    moved[target, every] += 1
    return moved, seconds[every, best]
