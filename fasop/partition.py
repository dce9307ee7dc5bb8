"""How many layers each stage gets: the smallest largest stage, exactly, and the shortest iteration, by search.

Everything works on many pipelines at once; partitions are [stages, pipelines]. Memory is part of the problem: no stage
ever gets more layers than its `capacity`. A stage may have none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conf.schema import Schedule
from fasop.fast import Floats
from fasop.pipelines import Linear, Pipelines
from fasop.placement import Integers

CELLS = 2**22
"""Stages times pipelines that are simulated together, at most; for memory's sake."""


def feasible(pipelines: Pipelines, layers: int) -> NDArray[np.bool_]:
    """[pipelines]: whether any partition of so many layers fits."""
    fits: NDArray[np.bool_] = np.all(pipelines.capacity >= 0, axis=0)
    fits &= np.minimum(pipelines.capacity, layers).sum(axis=0) >= layers
    return fits


def bottleneck(pipelines: Pipelines, layers: int) -> Integers:
    """The partitions whose largest stage time, forward and backward, is least; see `least_largest`."""
    return least_largest(_both_passes(pipelines), pipelines.capacity, layers)


def least_largest(costs: Linear, capacity: Integers, layers: int) -> Integers:
    """The partitions whose largest cost of a stage is least.

    Each layer in turn goes to the stage that then costs least of all that have room. That is optimal, since costs
    only grow with the layers (Ibaraki and Katoh 1988, resource allocation with a minimax objective): any other
    partition has a stage with at least as many layers as the largest stage has here. All pipelines must be `feasible`.
    The first of equal stages wins.
    """
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


def _both_passes(pipelines: Pipelines) -> Linear:
    forward, backward = pipelines.forward, pipelines.backward
    return Linear(fixed=forward.fixed + backward.fixed, layer=forward.layer + backward.layer)


def _below_level(costs: Linear, capacity: Integers, layers: int) -> Integers:
    """The layers that stages get before any costs more than all would if layers had parts: a head start."""
    level = (layers + (costs.fixed / costs.layer).sum(axis=0)) / (1 / costs.layer).sum(axis=0)
    given: Integers = np.clip(np.floor((level - costs.fixed) / costs.layer), 0, capacity).astype(np.int64)
    given[:, given.sum(axis=0) > layers] = 0
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

    The largest of three bounds. In each the first stage still sums its gradients, and then the embedding's.

    For the largest stage: it steps its optimizer and computes for all M micro-batches.

    For any stage s: the first micro-batch goes through all P stages and back; after it s has M - 1 backward passes
    left, and with 1F1B, where it has run P - s forward passes by then, M - P + s forward passes. All layers together
    take at least what they would on the fastest stage.

    For the mean over the stages: see `_mean_bound`.
    """
    costs, count = _both_passes(pipelines), pipelines.micro_batches
    stepped, after = pipelines.optimizer.fixed, pipelines.sums.fixed[0] + pipelines.embedding
    busiest = count * largest_stage(pipelines, balanced) + stepped.min(axis=0)
    ahead = max(0, count - pipelines.stages) if pipelines.schedule is Schedule.one_f_one_b else 0
    left = Linear(
        fixed=(count - 1) * pipelines.backward.fixed + ahead * pipelines.forward.fixed,
        layer=(count - 1) * pipelines.backward.layer + ahead * pipelines.forward.layer,
    )
    round_trip = costs.fixed.sum(axis=0) + layers * costs.layer.min(axis=0) + 2 * pipelines.hop[:-1].sum(axis=0)
    if count > 1:
        round_trip = round_trip + left.of(least_largest(left, pipelines.capacity, layers)).max(axis=0)
    mean = _mean_bound(pipelines, costs, layers)
    least: Floats = np.maximum(busiest, np.maximum(round_trip, mean) + stepped[0]) + after
    return least


def _mean_bound(pipelines: Pipelines, costs: Linear, layers: int) -> Floats:
    """[pipelines]: what the pipeline takes at least, by a mean over its stages.

    For every stage s, as in `bound`: U_0 + ... + U_(s-1) + M (f_s + b_s). The largest of these is at least their mean
    with any weights. Each is linear in the layers, so a mean is a constant and a price for each stage's layers, and no
    partition pays less than `layers` times the lowest price. The weights, found from the last stage back, make the
    prices equal where they can.
    """
    weights, later = np.zeros_like(costs.layer), np.zeros(len(pipelines))
    for stage in range(pipelines.stages - 1, -1, -1):
        weights[stage] = np.maximum(0.0, 1 / costs.layer[stage] - later) / pipelines.micro_batches
        later += weights[stage]
    weights /= later
    beyond = _later(weights)
    through = pipelines.micro_batches * weights + beyond
    constant = (through * costs.fixed + 2 * beyond * pipelines.hop).sum(axis=0)
    least: Floats = constant + layers * (through * costs.layer).min(axis=0)
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
    sums, optimizer = pipelines.exposed(amount), pipelines.optimizer.of(amount)
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
