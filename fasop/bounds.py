"""Seconds below which no partition gets an iteration, proved: by chains of waits that every partition has.

In all schedules a stage begins after the first micro-batch's way to it, computes for all micro-batches, and from its
last backward pass the gradient goes the same way back (with `zb_h1`, before the weight gradients that the stage still
owes). Then the first stage still sums its gradients, and then the embedding's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conf.schema import Schedule
from fasop.fast import Floats
from fasop.partition import both_passes, by_stage, largest_stage, least_largest
from fasop.pipelines import Linear, Pipelines
from fasop.placement import Integers


@dataclass(frozen=True, kw_only=True)
class _Chains:
    """What the links of such chains take, by stage."""

    own: Linear
    """A stage's passes from its first one until the last gradient leaves it."""
    way: Linear
    """Its passes for a micro-batch that only goes through it, there and back. Of several chunks the first one counts,
    which may have no layer."""
    trip: Floats
    """[pipelines]: the first micro-batch's way through all parts and back, with hops."""
    left: Linear | None
    """A stage's passes from the first gradient that leaves it until the last one; None: not counted."""


def passes_bound(pipelines: Pipelines, layers: int) -> Floats:
    """[pipelines]: a bound that takes hardly any time to work out: without hops, and as if the stages whose layers are
    fastest came first. `fasop.floor` has the proof; what a stage takes without layers counts as parts of layers.
    """
    count, every = pipelines.micro_batches, both_passes(pipelines)
    share = 1 - 1 / count if pipelines.schedule in (Schedule.gpipe, Schedule.one_f_one_b) else 1.0
    reach = share ** np.arange(pipelines.stages) @ (1 / np.sort(every.layer, axis=0))
    longest = count * (layers + (every.fixed / every.layer).sum(axis=0)) / reach
    least: Floats = longest + pipelines.optimizer.fixed.min(axis=0) + _freed(pipelines)
    return least


def _freed(pipelines: Pipelines) -> Floats:
    """[pipelines]: what follows at least on any stage's last backward pass."""
    sums = pipelines.least_exposed
    freed: Floats = sums.min(axis=0) if pipelines.schedule is Schedule.zb_h1 else sums[0] + pipelines.embedding
    return freed


def quick_bound(pipelines: Pipelines, layers: int, balanced: Integers) -> Floats:
    """[pipelines]: the largest of three bounds; `balanced` is from `bottleneck`.

    For the largest stage: it steps its optimizer and computes for all micro-batches.

    For any stage: the first micro-batch goes through all parts and back, and then the stage has passes left.

    For the mean over the stages: see `_mean_bound`.
    """
    chains, stepped = _chains(pipelines, layers), pipelines.optimizer.fixed
    first_sums = pipelines.least_exposed[0] + pipelines.embedding
    busiest = pipelines.micro_batches * largest_stage(pipelines, balanced) + stepped.min(axis=0) + _freed(pipelines)
    longest = np.maximum(_mean_bound(chains, pipelines.hop, layers), chains.trip)
    if chains.left is not None:
        most = least_largest(chains.left, pipelines.capacity, layers)
        longest = np.maximum(longest, chains.trip + chains.left.of(most).max(axis=0))
    least: Floats = np.maximum(busiest, longest + stepped[0] + first_sums)
    return least


def _chains(pipelines: Pipelines, layers: int) -> _Chains:
    """With 1F1B and `zb_h1`, stage s of P has run P - s forward passes when the first gradient leaves it, and with
    `zb_h1` its weight gradients lag s micro-batches behind.
    """
    schedule, stages, count = pipelines.schedule, pipelines.stages, pipelines.micro_batches
    split, hop = schedule is Schedule.zb_h1, pipelines.hop
    forward, backward, number = pipelines.forward, pipelines.backward, np.arange(float(stages)).reshape(-1, 1)
    trip = _weighted(1, forward, 0.5 if split else 1, backward)
    left = None
    if schedule is not Schedule.interleaved and count > 1:
        ahead = np.zeros_like(number) if schedule is Schedule.gpipe else np.maximum(0, count - stages + number)
        whole = count - 1 - (np.minimum(number, count - 1) / 2 if split else 0 * number)
        left = _weighted(ahead, forward, whole, backward)
    owed = np.where(number > 0, np.minimum(number + 1, count) / 2, 0) if split else 0 * number
    crossed = slice(0, stages)
    return _Chains(
        own=_weighted(count, by_stage(forward, stages), count - owed, by_stage(backward, stages)),
        way=Linear(
            fixed=trip.fixed[crossed],
            layer=trip.layer[crossed] if pipelines.parts_count == stages else 0 * hop,
        ),
        trip=(
            trip.fixed.sum(axis=0)
            + layers * trip.layer.min(axis=0)
            + 2 * (pipelines.parts_count // stages * hop.sum(axis=0) - hop[-1])
        ),
        left=left,
    )


def _weighted(forwards: Floats | float, forward: Linear, backwards: Floats | float, backward: Linear) -> Linear:
    return Linear(
        fixed=forwards * forward.fixed + backwards * backward.fixed,
        layer=forwards * forward.layer + backwards * backward.layer,
    )


def _mean_bound(chains: _Chains, hop: Floats, layers: int) -> Floats:
    """[pipelines]: what the pipeline takes at least, by a mean over its stages.

    For every stage s: the way through those before it, and its own passes. The largest of these is at least their mean
    with any weights. Each is linear in the layers, so a mean is a constant and a price for each stage's layers, and no
    partition pays less than `layers` times the lowest price. The weights, found from the last stage back, make the
    prices equal where they can.
    """
    own, way = chains.own, chains.way
    weights, later = np.zeros_like(own.layer), np.zeros(own.layer.shape[1])
    for stage in range(len(weights) - 1, -1, -1):
        weights[stage] = np.maximum(0.0, 1 - later * way.layer[stage]) / own.layer[stage]
        later += weights[stage]
    weights /= later
    beyond = np.cumsum(weights[::-1], axis=0)[::-1] - weights
    constant = (weights * own.fixed + beyond * (way.fixed + 2 * hop)).sum(axis=0)
    least: Floats = constant + layers * (weights * own.layer + beyond * way.layer).min(axis=0)
    return least
