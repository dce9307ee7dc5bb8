"""How many layers each stage gets: the smallest largest stage, exactly, and the shortest iteration, by search.

Everything works on many pipelines at once; partitions are [stages, pipelines]. Memory is part of the problem: no stage
ever gets more layers than its `capacity`. A stage may have none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fasop.fast import Floats
from fasop.pipelines import Pipelines
from fasop.placement import Integers

CELLS = 2**22
"""Stages times pipelines that are simulated together, at most; for memory's sake."""


def feasible(pipelines: Pipelines, layers: int) -> NDArray[np.bool_]:
    """[pipelines]: whether any partition of so many layers fits."""
    fits: NDArray[np.bool_] = np.all(pipelines.capacity >= 0, axis=0)
    fits &= np.minimum(pipelines.capacity, layers).sum(axis=0) >= layers
    return fits


def bottleneck(pipelines: Pipelines, layers: int) -> Integers:
    """The partitions whose largest stage time, forward and backward, is least.

    Each layer in turn goes to the stage that then takes least of all that have room. That is optimal, since stage
    times only grow with their layers (Ibaraki and Katoh 1988, resource allocation with a minimax objective): some
    stage of any partition has as many layers as the largest stage here, or the room is used up. All pipelines must be
    `feasible`. The first of equal stages wins.
    """
    growth = pipelines.forward.layer + pipelines.backward.layer
    after = pipelines.forward.fixed + pipelines.backward.fixed + growth
    after = np.where(pipelines.capacity > 0, after, np.inf)
    given = np.zeros(after.shape, np.int64)
    every = np.arange(len(pipelines))
    for _ in range(layers):
        stage = np.argmin(after, axis=0)
        given[stage, every] += 1
        after[stage, every] += growth[stage, every]
        after[stage, every] = np.where(
            given[stage, every] < pipelines.capacity[stage, every], after[stage, every], np.inf
        )
    return given


def largest_stage(pipelines: Pipelines, partitions: Integers) -> Floats:
    """[pipelines]: seconds of the largest stage's forward and backward pass."""
    times = pipelines.forward.of(partitions) + pipelines.backward.of(partitions)
    slowest: Floats = times.max(axis=0)
    return slowest


def improved(pipelines: Pipelines, partitions: Integers) -> tuple[Integers, Floats]:
    """Moves one layer from any stage to any other for as long as that shortens the iteration, the best move first.

    Only moves from a steeper stage to a less steep one can (`Pipelines.slopes`). Of them the most promising are tried
    first, and the others if none of those gains. Returns the partitions reached, and their seconds. Of equal moves the
    most promising wins, and of those the first.
    """
    found, times = partitions.copy(), pipelines.iteration(partitions)
    stages = len(found)
    pairs = np.array([(a, b) for a in range(stages) for b in range(stages) if a != b]).reshape(-1, 2)
    first = min(2 * stages, len(pairs))
    active = np.arange(len(pipelines))
    while len(active) and len(pairs):
        gained = np.zeros(len(active), bool)
        batch = max(1, CELLS // (stages * len(pairs)))
        for begin in range(0, len(active), batch):
            here = np.arange(begin, min(begin + batch, len(active)))
            ranked, promising = _ranked(pipelines.take(active[here]), found[:, active[here]], pairs)
            for places in (slice(0, first), slice(first, None)):
                left = np.nonzero(~gained[here])[0]
                columns = active[here[left]]
                tried = pairs[ranked[left, places]], promising[left, places]
                moved, taken = _tried(pipelines.take(columns), found[:, columns], *tried)
                better = taken < times[columns]
                found[:, columns[better]], times[columns[better]] = moved[:, better], taken[better]
                gained[here[left[better]]] = True
        active = active[gained]
    return found, times


def _ranked(pipelines: Pipelines, partitions: Integers, pairs: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """[pipelines, pairs]: the moves from the most to the least promising, and whether each could gain and fits."""
    slopes = pipelines.slopes(partitions).T
    source, target = pairs.T
    gain = slopes[:, source] - slopes[:, target]
    possible = (partitions[source] > 0) & (partitions[target] < pipelines.capacity[target])
    gain = np.where(possible.T, gain, -1.0)
    order = np.argsort(-gain, axis=1, kind="stable")
    return order, np.take_along_axis(gain, order, axis=1) > 0


def _tried(
    pipelines: Pipelines, partitions: Integers, pairs: Integers, promising: NDArray[np.bool_]
) -> tuple[Integers, Floats]:
    """The best neighbour of each partition, and its seconds; infinite where no move is promising.

    `pairs` are [pipelines, moves, 2], from which stage to which.
    """
    every = np.arange(len(pipelines))
    if not promising.any():
        return partitions, np.full(len(every), np.inf)
    owner, move = np.nonzero(promising)
    near, many = partitions[:, owner], np.arange(len(owner))
    source, target = pairs[owner, move].T
    near[source, many] -= 1
    near[target, many] += 1
    seconds = np.full(promising.shape, np.inf)
    seconds[owner, move] = pipelines.take(owner).iteration(near)
    best = np.argmin(seconds, axis=1)
    moved = partitions.copy()
    source, target = pairs[every, best].T
    moved[source, every] -= 1
    moved[target, every] += 1
    return moved, seconds[every, best]


def quick_bound(pipelines: Pipelines, layers: int, balanced: Integers) -> Floats:
    """[pipelines]: seconds below which no partition gets an iteration, proved; `balanced` is from `bottleneck`.

    The larger of two bounds. For the largest stage: it steps its optimizer and computes for all M micro-batches, and
    then the first stage still sums its gradients and the embedding's.

    For every stage s, as in `bound`: U_0 + ... + U_(s-1) + M (f_s + b_s), and then the same sums. The largest of these
    is at least their mean with any weights. Each is linear in the layers, so a mean is a constant and a price for each
    stage's layers, and no partition pays less than `layers` times the lowest price. The weights, found from the last
    stage back, make the prices equal where they can.
    """
    work = pipelines.forward.layer + pipelines.backward.layer
    fixed = pipelines.forward.fixed + pipelines.backward.fixed
    after = pipelines.sums.fixed[0] + pipelines.embedding
    one = pipelines.micro_batches * largest_stage(pipelines, balanced) + pipelines.optimizer.fixed.min(axis=0)
    weights, later = np.zeros_like(work), np.zeros(len(pipelines))
    for stage in range(pipelines.stages - 1, -1, -1):
        weights[stage] = np.maximum(0.0, 1 / work[stage] - later) / pipelines.micro_batches
        later += weights[stage]
    weights /= later
    beyond = _later(weights)
    through = pipelines.micro_batches * weights + beyond
    constant = (through * fixed + 2 * beyond * pipelines.hop).sum(axis=0) + pipelines.optimizer.fixed[0]
    mean = constant + layers * (through * work).min(axis=0)
    least: Floats = np.maximum(one, mean) + after
    return least


def _later(weights: Floats) -> Floats:
    """[stages, pipelines]: the sum of those of all later stages."""
    sums: Floats = np.cumsum(weights[::-1], axis=0)[::-1] - weights
    return sums


def bound(pipelines: Pipelines, layers: int) -> Floats:
    """[pipelines]: seconds below which no partition that fits gets an iteration, proved; any schedule that runs every
    micro-batch forward and backward through all stages in order.

    Let U be what stages take for a micro-batch, forward and backward, with their hops both ways. A stage s begins
    after the first micro-batch's way through those before it, computes for all micro-batches, and then the last one
    goes back the same way: at least U_0 + ... + U_(s-1) + M (f_s + b_s), between the first stage's optimizer step and
    its sum of gradients and then the embedding's. Counting the way there alone, s may sum its own gradients instead;
    counting the way back alone, it may step its own optimizer. The best partition for each of these three is found
    exactly, from the last stage back: with k layers left for stages from s on, either s itself takes longest, or what
    comes after it does.
    """
    amount = np.arange(layers + 1).reshape(-1, 1, 1)
    forward, backward = pipelines.forward.of(amount), pipelines.backward.of(amount)
    sums, optimizer = pipelines.sums.of(amount), pipelines.optimizer.of(amount)
    hop, shared = pipelines.hop, pipelines.embedding + sums[:, 0]
    work = pipelines.micro_batches * (forward + backward)
    own = np.concatenate([work, work + sums, work + optimizer], axis=2)
    through = np.concatenate([forward + backward + 2 * hop, forward + hop, backward + hop], axis=2)
    first = np.concatenate([optimizer[:, 0] + shared, optimizer[:, 0], shared], axis=1)
    room = np.tile(np.where(amount <= pipelines.capacity, 0.0, np.inf), (1, 1, 3))
    least: Floats = _chain(own, through, first, room).reshape(3, -1).max(axis=0)
    return least


def _chain(own: Floats, through: Floats, first: Floats, room: Floats) -> Floats:
    """[pipelines]: the least, over partitions, of first(n_0) + the largest of through(n_0) + ... + own(n_s).

    Arrays are by number of layers, then stages and pipelines; `first` of the first stage alone.
    """
    layers, stages = len(own) - 1, own.shape[1]
    left = own[:, -1] + room[:, -1]
    for stage in range(stages - 2, -1, -1):
        ahead = np.full_like(left, np.inf)
        extra = first if stage == 0 else np.zeros_like(first)
        for here in range(layers + 1):
            value = np.maximum(own[here, stage], through[here, stage] + left[: layers + 1 - here])
            value = value + extra[here] + room[here, stage]
            np.minimum(ahead[here:], value, out=ahead[here:])
        left = ahead
    result: Floats = left[layers] + (first[layers] if stages == 1 else 0.0)
    return result
