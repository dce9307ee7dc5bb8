"""Seconds below which no partition gets an iteration, proved: by chains of waits that every partition has
(`fasop.partition.chains`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import bounds as compiled
from fasop.costs.arrays import Floats, Integers
from fasop.costs.schedules import passes_left
from fasop.partition.chains import Chains, both_passes, chains_of, weighted
from fasop.partition.heterogeneous_layers import CLOSE, in_units, least_largest_part
from fasop.partition.local_search import Worth, bottleneck, largest_stage, least_largest
from fasop.simulation.linear import TINY, Linear
from fasop.simulation.pipelines import Columns, Pipelines

LEVELS = 200
"""Amounts that are looked at one after another."""
ROUNDING = 1e-9
"""What is this near below a whole number of layers counts as one."""


def _freed(pipelines: Pipelines) -> Floats:
    """[pipelines]: what follows at least on any stage's last backward pass."""
    sums = pipelines.least_exposed
    return sums.min(axis=0) if pipelines.schedule.definition.splits_backward else sums[0] + pipelines.embedding


def quick_bound(pipelines: Pipelines, layers: int, balanced: Integers, worth: Worth | None = None) -> Floats:
    """[pipelines]: the largest of six bounds; `balanced` is from `bottleneck`.

    For the largest stage: it steps its optimizer and computes for all micro-batches, and then either its gradient goes
    back to the first stage (`_back_bound`), or it sums its gradients (`_summing_bound`).

    For any stage, and for the mean over the stages: the first micro-batch goes through all parts and back, and then the
    stage has passes left (`_trip_bound`).

    For the mean over the stages: see `_mean_bound`; for the links between them `_queue_bound`.

    Layers that differ are taken for amounts of work (`fasop.partition.heterogeneous_layers.in_units`). Where those
    bounds that are found in little time are of no `worth`, the others are left out.
    """
    alike = np.ones(len(pipelines), bool)
    for one in pipelines.replicas:
        alike[one.of] = False

    def of_lines(lines: Pipelines, of: Columns) -> list[Floats]:
        if lines is pipelines:  # what replicas say counts where they differ
            return [_bound(replace(lines, replicas=()), layers, balanced, worth, alike)]
        return [_bound(lines, layers, bottleneck(lines, layers), worth, np.ones(len(lines), bool))]

    return pipelines.of_slowest_replicas(of_lines)[0]


def _bound(
    pipelines: Pipelines, layers: int, balanced: Integers, worth: Worth | None, wanted: NDArray[np.bool_]
) -> Floats:
    """[pipelines]: as `quick_bound`, where the replicas of each pipeline are alike; the closest of those `wanted`."""
    if pipelines.order is not None:
        return _bound_in_units(pipelines, balanced, worth, wanted)
    chains = chains_of(pipelines)
    back = pipelines.micro_batches * largest_stage(pipelines, balanced) + _freed(pipelines)
    whole_trip = _whole_trip(chains)
    trip = whole_trip + mean_of(chains.trip.layer, chains.left, layers)
    longest = np.maximum.reduce(
        [trip, _mean_bound(chains, pipelines.mean_hop, layers), _queue_bound(pipelines, chains, layers)]
    )
    ending = pipelines.optimizer.fixed[0] + pipelines.least_exposed[0] + pipelines.embedding
    least: Floats = np.maximum(back + pipelines.optimizer.fixed.min(axis=0), longest + ending)
    some = np.nonzero(wanted if worth is None else wanted & worth(least))[0]
    if len(some):
        lines = pipelines.take(some)
        trip = whole_trip[some] + _trip_bound(chains, some, lines.capacity, layers) + ending[some]
        least[some] = np.maximum.reduce([least[some], trip, _summing_bound(lines, layers), _back_bound(lines, layers)])
    return least


def _whole_trip(chains: Chains) -> Floats:
    """[pipelines]: what the first micro-batch's trip takes beside its layers."""
    return chains.hops + chains.trip.fixed.sum(axis=0)


def _queue_bound(pipelines: Pipelines, chains: Chains, layers: int | Floats) -> Floats:
    """[pipelines]: the busiest link sends all messages one after another. Before the first of them and behind the last
    one lies a micro-batch's trip.

    Of several chunks, the first activations on a link come from its first chunk, and the last ones go to the end of the
    model and all the way back: between them lie no backward passes of that micro-batch, but its forward passes of some
    chunks. Likewise, all forward passes come before the first gradients on a link."""
    cuts, count, chunks = pipelines.stages - 1, pipelines.micro_batches, pipelines.parts_count // pipelines.stages
    if not cuts:
        return np.zeros(len(pipelines))
    ahead = pipelines.occupied[:cuts]
    back = ahead if pipelines.back is None else pipelines.back.messages(None)[1][:cuts]
    busiest = np.maximum(ahead, back).max(axis=0)
    if chunks > 1:
        ways = [(pipelines.backward, pipelines.forward, ahead), (pipelines.forward, pipelines.backward, back)]
        queues = [
            (chunks * count - 1) * sent.max(axis=0)
            + whole.fixed.sum(axis=0)
            + layers * whole.layer.min(axis=0)
            + ends.fixed[[0, -1]].sum(axis=0)
            for whole, ends, sent in ways
        ]
        hop = pipelines.hop if pipelines.back is None else np.minimum(pipelines.hop, pipelines.back.hop)
        return np.asarray(np.maximum(*queues) + (chunks + 1) * hop[:cuts].sum(axis=0) + (chunks - 1) * hop[-1])
    trip = _whole_trip(chains) + layers * chains.trip.layer.min(axis=0)
    queue = trip + (count - 1) * busiest
    if pipelines.one_way_out is not None and cuts > 1:  # what goes ahead and back leaves such a stage by one link
        both = np.where(pipelines.one_way_out[1:cuts, np.newaxis], count * (ahead[1:] + back[:-1]), 0.0)
        before = 2 * np.cumsum(pipelines.mean_hop[: cuts - 1], axis=0) - back[:-1]
        queue = np.maximum(queue, (before + both).max(axis=0))
    return np.asarray(queue)


def _bound_in_units(pipelines: Pipelines, balanced: Integers, worth: Worth | None, wanted: NDArray[np.bool_]) -> Floats:
    """Bound layers that differ like `_bound`. The smallest largest stage is known where each has one chunk."""
    plain, units = in_units(pipelines)
    chains, stepped = chains_of(plain), plain.optimizer.fixed
    first_sums = plain.least_exposed[0] + plain.embedding
    whole_trip = _whole_trip(chains)
    queue = _queue_bound(plain, chains, units)
    trip = mean_of(chains.trip.layer, chains.left, units)
    if (of_part := chains.of_part) is not None:
        trips = np.tile(chains.trip.layer, (len(of_part.layer) // plain.stages, 1))
        trip = np.maximum(trip, mean_of(trips, of_part, units))
    if pipelines.parts_count > pipelines.stages:
        longest = np.maximum(_mean_bound(chains, plain.mean_hop, units), whole_trip + trip)
        return np.asarray(np.maximum(longest, queue) + stepped[0] + first_sums)
    left = _passes_left(pipelines)
    amount = (1 - CLOSE) * left.of(pipelines.counted(least_largest_part(pipelines, left))).max(axis=0)
    trip = np.maximum(trip, _trip_from(amount, chains, units))
    longest = np.maximum.reduce([_mean_bound(chains, plain.mean_hop, units), whole_trip + trip, queue])
    largest = (1 - CLOSE) * largest_stage(pipelines, balanced)
    back = pipelines.micro_batches * largest + stepped.min(axis=0) + _freed(pipelines)
    least: Floats = np.maximum(longest + stepped[0] + first_sums, back)
    some = np.nonzero(wanted if worth is None else wanted & worth(least))[0]
    if len(some) and (plain.sums.layer.any() or plain.optimizer.layer.any()):
        lines = pipelines.take(some)
        whole = _until_summed(lines, lines.unhidden(0).sums)
        found = least_largest_part(lines, whole)
        least[some] = np.maximum(least[some], (1 - CLOSE) * whole.of(lines.counted(found)).max(axis=0))
    return least


def _passes_left(pipelines: Pipelines) -> Linear:
    """`Chains.left` of stages with one chunk, with a slope for each kind of layer where they differ."""
    left = passes_left(pipelines.schedule, pipelines.stages, 1, pipelines.micro_batches)
    return weighted(left.forward.T, pipelines.forward, left.backward.T, pipelines.backward)


def _trip_from(amount: Floats, chains: Chains, units: Floats) -> Floats:
    """[pipelines]: as `mean_of`, if a stage has that `amount` left at least; 0 where more than that may be better.

    Stages have room for as many units; those go where the trip is shortest. If a stage that takes more without any has
    room from this amount on, what amount and trip take together is convex: where more of it gains nothing at once, it
    never does.
    """
    order = np.argsort(chains.trip.layer, axis=0, kind="stable")
    trip, layer, fixed = (
        np.take_along_axis(part, order, axis=0) for part in (chains.trip.layer, chains.left.layer, chains.left.fixed)
    )
    room = np.maximum(0.0, amount - fixed) / np.maximum(layer, TINY)
    held = np.minimum(np.cumsum(room, axis=0), units)
    last = np.minimum((held < units).sum(axis=0), len(trip) - 1)
    price = np.take_along_axis(trip, last[np.newaxis], axis=0)
    full = np.arange(len(trip))[:, np.newaxis] < last
    gained = np.where(full, (price - trip) / np.maximum(layer, TINY), 0.0).sum(axis=0)
    taken = amount + (np.diff(held, axis=0, prepend=0) * trip).sum(axis=0)
    return np.where(gained <= 1, taken, 0.0)


def _summing_bound(pipelines: Pipelines, layers: int) -> Floats:
    """[pipelines]: the largest stage's optimizer step, passes and sums, which is least where those are balanced."""
    whole = never_less_until_summed(pipelines, layers)
    return whole.of(least_largest(whole, pipelines.capacity, layers)).max(axis=0)


def _back_bound(pipelines: Pipelines, layers: int) -> Floats:
    """[pipelines]: of several chunks, a stage steps its optimizer and has all its passes, the last of which is the last
    micro-batch's in its first chunk. Its gradient goes back to the first stage, which sums its own and then the
    embedding's. The largest stage's path is least where these are balanced.

    It holds of 1F1B and GPipe, too, but the search is tuned to bounds without it (`local_search.REACH`).
    """
    if not pipelines.schedule.definition.has_chunks:
        return np.zeros(len(pipelines))
    stages, both, step = pipelines.stages, both_passes(pipelines), pipelines.optimizer
    hop = pipelines.hop if pipelines.back is None else pipelines.back.hop
    after = np.zeros_like(step.fixed) + pipelines.least_exposed[0] + pipelines.embedding
    after[1:] += np.cumsum(hop[: stages - 1] + pipelines.backward.fixed[: stages - 1], axis=0)
    path = Linear(
        fixed=step.fixed + pipelines.micro_batches * both.fixed + after,
        layer=step.layer + pipelines.micro_batches * both.layer,
    )
    return path.of(least_largest(path, pipelines.capacity, layers)).max(axis=0)


def never_less_until_summed(pipelines: Pipelines, layers: int) -> Linear:
    """[stages, pipelines]: a stage's optimizer step, passes and sums, at least, which do not fall with its layers."""
    sums = pipelines.unhidden(layers).sums
    fixed = sums.fixed + layers * np.minimum(0.0, sums.layer)
    return _until_summed(pipelines, Linear(fixed=fixed, layer=np.maximum(0.0, sums.layer)))


def _until_summed(pipelines: Pipelines, sums: Linear) -> Linear:
    """[stages, pipelines]: a stage's optimizer step, passes and sums."""
    both, step = both_passes(pipelines), pipelines.optimizer
    whole = Linear(
        fixed=step.fixed + pipelines.micro_batches * both.fixed + sums.fixed,
        layer=step.layer + pipelines.micro_batches * both.layer + sums.layer,
    )
    whole.fixed[0] += pipelines.embedding
    whole.fixed[-1] += pipelines.embedding if pipelines.stages > 1 else 0
    return whole


def _trip_bound(chains: Chains, some: Integers, capacity: Integers, layers: int) -> Floats:
    """[pipelines], of some: what the first micro-batch's trip takes for its layers, and then the largest stage's passes
    left, or the largest part's. Of the stage's, `mean_of` is in the bounds that are found in little time."""
    trip, parts = chains.trip.layer[:, some], chains.of_part
    longest = whole_of(trip, chains.left.take(some), capacity, layers)
    if parts is not None and chains.turn is not None:
        chunks = len(parts.layer) // len(trip)
        trips, capacities = np.tile(trip, (chunks, 1)), np.tile(capacity, (chunks, 1))
        longest = np.maximum(longest, mean_of(trips, parts.take(some), layers))
        longest = np.maximum(longest, whole_of(trips, chains.turn.take(some), capacities, layers))
    return longest


def whole_of(trip: Floats, left: Linear, capacity: Integers, layers: int) -> Floats:
    """[pipelines]: as `mean_of`, but of whole layers: the least over all amounts that the largest stage may have left.

    For each amount stages have room for whole layers; those go where the trip is shortest. More than the least amount
    for which there is room at all is worth it only as long as it takes less than the trip can become shorter.
    """
    if not left.layer.all():
        return np.zeros(trip.shape[1])
    amount = left.of(least_largest(left, capacity, layers)).max(axis=0)
    if hasattr(compiled, "whole_of"):
        return compiled.whole_of(trip, left.fixed, left.layer, capacity, amount, layers, LEVELS, ROUNDING)
    order = np.argsort(trip, axis=0, kind="stable")
    sorted_trip = np.take_along_axis(trip, order, axis=0)
    most = np.minimum(capacity, layers)
    found, every = np.full(trip.shape[1], np.inf), np.arange(trip.shape[1])
    fixed, layer = left.fixed, left.layer
    for _ in range(LEVELS):
        room = np.maximum(0, np.minimum(np.floor((amount - fixed) / layer + ROUNDING), most))
        held = np.minimum(np.cumsum(np.take_along_axis(room, order, axis=0), axis=0), layers)
        held[1:] -= held[:-1].copy()
        found[every] = np.minimum(found[every], amount + _sum_of(held * sorted_trip))
        following = np.where(room < most, fixed + (room + 1) * layer, np.inf).min(axis=0)
        amount = np.maximum(amount, following)
        open_ = following + layers * sorted_trip[0] < found[every]
        if not open_.any():
            return found
        if 2 * open_.sum() < len(every):
            fixed, layer, most = (np.broadcast_to(part, room.shape)[:, open_] for part in (fixed, layer, most))
            order, sorted_trip = order[:, open_], sorted_trip[:, open_]
            every, amount = every[open_], amount[open_]
    found[every] = np.minimum(found[every], amount + layers * sorted_trip[0])
    return found


def mean_of(trip: Floats, left: Linear, layers: int | Floats) -> Floats:
    """[pipelines]: what the trip's passes of layers take at least, and the largest stage's passes left.

    The largest is at least the mean with any weights, and that is a constant and a price for each stage's layers. No
    partition pays less than `layers` times the lowest price; the weights make the prices equal where they can.
    """
    if hasattr(compiled, "mean_of"):
        return compiled.mean_of(trip, left.fixed, left.layer, _of_each(layers, trip), TINY)
    weights = np.maximum(0.0, level(trip, left.layer) - trip) / np.maximum(left.layer, TINY)
    weights /= np.maximum(_sum_of(weights), TINY)
    lowest = (trip + weights * left.layer).min(axis=0)
    return layers * lowest + _sum_of(weights * left.fixed)


def _of_each(layers: int | Floats, rows: Floats) -> Floats:
    """[pipelines]: how many layers each has, for compiled loops; `rows` are [stages, pipelines]."""
    return np.broadcast_to(np.asarray(layers, float), rows.shape[1:])


def _sum_of(rows: Floats) -> Floats:
    """[pipelines]: the sum of all rows, one after another as in compiled loops, whatever their order in memory."""
    return np.cumsum(rows, axis=0)[-1]


def level(trip: Floats, left: Floats) -> Floats:
    """[pipelines], of [stages, pipelines]: the least price of a layer, `trip` and the largest of `left`, if layers have
    parts: those stages have any whose trip is shortest, and each has as much left.
    """
    cheapest = np.argsort(trip, axis=0, kind="stable")
    share = 1 / np.maximum(np.take_along_axis(left, cheapest, axis=0), TINY)
    paid = np.cumsum(share * np.take_along_axis(trip, cheapest, axis=0), axis=0)
    return ((1 + paid) / np.cumsum(share, axis=0)).min(axis=0)


def _mean_bound(chains: Chains, hop: Floats, layers: int | Floats) -> Floats:
    """[pipelines]: what the pipeline takes at least, by a mean over its stages.

    For every stage s: the way through those before it, and its own passes. The largest of these is at least their mean
    with any weights. Each is linear in the layers, so a mean is a constant and a price for each stage's layers, and no
    partition pays less than `layers` times the lowest price. The weights, found from the last stage back, make the
    prices equal where they can.
    """
    own, way = chains.own, chains.way
    passed, own_layer = way.fixed + 2 * hop, np.maximum(own.layer, TINY)
    if hasattr(compiled, "mean_over_stages"):
        each = _of_each(layers, own.fixed)
        return compiled.mean_over_stages(own.fixed, own_layer, passed, way.layer, each)
    weights, later = np.zeros_like(own_layer), np.zeros(own_layer.shape[1])
    for stage in range(len(weights) - 1, -1, -1):
        weights[stage] = np.maximum(0.0, 1 - later * way.layer[stage]) / own_layer[stage]
        later += weights[stage]
    weights /= later
    beyond = np.cumsum(weights[::-1], axis=0)[::-1] - weights
    constant = _sum_of(weights * own.fixed + beyond * passed)
    return constant + layers * (weights * own_layer + beyond * way.layer).min(axis=0)
