"""The stages of plans by the slowest kind of their GPUs, and what passes and sums take on each kind at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import overlap
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.parallelism import Numbers, Parallelism
from fasop.costs.schedules import filling, passes_left
from fasop.costs.training import Training
from fasop.partition.class_bounds import Classes, suffix_min
from fasop.search.bounds.least_exchange import Alone, of_any_stage
from fasop.simulation.linear import TINY
from megatron_ext.contract.parallel_config import Recompute, Schedule


class Way(NamedTuple):
    """What of a plan, beside its sizes, decides how long its layers take."""

    schedule: Schedule
    chunks: int
    recompute: Recompute

    @classmethod
    def of(cls, parallel: Parallelism) -> Way:
        return cls(parallel.schedule, parallel.chunks, parallel.recompute)


def has_heterogeneous_replicas(one: Training, kinds: Sequence[NodeKind]) -> bool:
    """Whether some order of the nodes may give replicas different GPUs in a stage."""
    parallel = one.parallel
    width = parallel.tensor_size * parallel.data
    return len(kinds) > 1 and parallel.data > 1 and any(kind.gpus % width for kind in kinds)


def micro_batches_of(one: Training, kinds: Sequence[NodeKind]) -> tuple[int, int]:
    """Micro-batches of some replicas, and how many of these there are: all with the least number, or those with the
    most, of which one has few fast GPUs if there are many. Where all have the same GPUs, the most take longest."""
    parallel = one.parallel
    if parallel.shares is None or not has_heterogeneous_replicas(one, kinds):
        return parallel.micro_batches, parallel.data
    counts = parallel.micro_batches_of
    most = counts.count(max(counts))
    of_most = len({kind.gpus for kind in kinds}) == 1 or 2 * most > len(counts)
    return (max(counts), most) if of_most else (min(counts), parallel.data)


def of_each(plans: Sequence[Training], of: Callable[[Training], object]) -> NDArray[Any]:
    """[plans, ...]: what is said of each, of which many are the same object."""
    distinct = {id(one): one for one in plans}
    place = {number: at for at, number in enumerate(distinct)}
    return np.array([*map(of, distinct.values())])[[place[id(one)] for one in plans]]


def gpus_of_sets(sets: Sequence[Sequence[NodeKind]]) -> Integers:
    """[sets, kinds]"""
    known = {id(kinds): [kind.gpus * kind.group.count for kind in kinds] for kinds in sets}
    return np.array([known[id(kinds)] for kinds in sets])


def classes_of(
    plans: Sequence[Training],
    way: Way,
    kinds: Sequence[NodeKind],
    times: Floats,
    head: Floats,
    counts: tuple[Integers, Integers],
    mixed: NDArray[np.bool_],
    gpus: Integers,
) -> Classes:
    """`times` [plans, kinds, 2] are seconds of a layer, or of a unit where layers differ, `head` those of the head,
    `counts` [plans] the micro-batches of some replicas, and of how many, `mixed` whether replicas of each plan may
    lie on unlike GPUs, and `gpus` [plans, kinds] how many there are. What sums take is left out of `busy`."""
    fastest, forward, backward = _fastest_first(times)
    gpus = np.take_along_axis(gpus, fastest, axis=1)
    tensor, pipeline = of_each(plans, lambda one: (one.parallel.tensor_size, one.parallel.pipeline)).T
    most, (count, replicas) = pipeline.max(), counts
    sizes = [*zip(pipeline.tolist(), count.tolist(), strict=True)]
    places = {size: place for place, size in enumerate(dict.fromkeys(sizes))}
    rows = [places[size] for size in sizes]
    passes = np.stack([_passes(way.schedule, way.chunks, *size, most) for size in places])[rows]
    ahead, back = passes.transpose(1, 0, 2, 3)[..., np.newaxis, :]
    left = ahead * forward[:, np.newaxis, :, np.newaxis] + back * backward[:, np.newaxis, :, np.newaxis]
    every = np.arange(len(plans))
    last = passes[every, :, -1, pipeline - 1]
    heads = np.take_along_axis((last[:, np.newaxis] * head).sum(axis=2), fastest, axis=1)
    turn = np.array([[way.schedule.definition.in_turn(*size)] for size in places])[rows]
    then = np.array([_then(way.schedule, way.chunks, *size) for size in places])[rows]
    shares = np.cumsum(gpus, axis=1) / (tensor * replicas)[:, np.newaxis]
    if len({kind.gpus for kind in kinds}) == 1:
        for row in np.nonzero(mixed)[0].tolist():
            if plans[row].parallel.shares is not None:
                parallel, nodes = plans[row].parallel, np.cumsum(gpus[row]) // kinds[0].gpus
                groups = kinds[0].gpus // parallel.tensor_size
                shares[row] = _most_stages(parallel.micro_batches_of, parallel.pipeline, groups)[nodes]
    shares = np.minimum(shares, pipeline[:, np.newaxis])
    return Classes(
        stages=np.diff(shares.astype(np.int64), axis=1, prepend=0),
        shares=np.diff(shares, axis=1, prepend=0),
        trip=suffix_min(forward + way.schedule.definition.input_share * backward),
        both=forward + backward,
        left=suffix_min(left.min(axis=1)),
        turn=suffix_min((turn - 1) * backward),
        of_part=suffix_min(then[:, :1] * forward + (turn - 1 + then[:, 1:]) * backward),
        busy=suffix_min(count[:, np.newaxis, np.newaxis] * (forward + backward)[..., np.newaxis]),
        head=suffix_min(heads),
        of_last=suffix_min(left.min(axis=1)[every, :, pipeline - 1]),
        slowest=forward.max(axis=1) + way.schedule.definition.input_share * backward.max(axis=1),
    )


def busy_seconds(
    plans: Sequence[Training],
    way: Way,
    alone: Sequence[Alone],
    times: Floats,
    count: Integers,
    mixed: NDArray[np.bool_],
    gpus: Integers,
) -> Floats:
    """`Classes.busy` of plans whose layers are alike, with sums; the arguments are those of `classes_of`."""
    fastest, forward, backward = _fastest_first(times)
    exposed = _exposed(plans, way, alone, backward, fastest, mixed, gpus)
    layers = np.arange(1.0, plans[0].blocks.layers + 1)
    busy = count[:, np.newaxis, np.newaxis] * (forward + backward)[..., np.newaxis] * layers + exposed
    return suffix_min(np.minimum.accumulate(busy[..., ::-1], axis=2)[..., ::-1])


def _exposed(
    plans: Sequence[Training],
    way: Way,
    alone: Sequence[Alone],
    backward: Floats,
    order: Integers,
    mixed: NDArray[np.bool_],
    gpus: Integers,
) -> Floats:
    """[plans, kinds, layers]: seconds of the sums of gradients that the last backward pass does not hide, and of
    handing out new weights, at least, of a stage whose slowest GPUs are of this kind.

    `backward` are seconds of a layer, with the kinds in this order. Of stages on unlike GPUs the slowest link
    counts, and the slowest backward pass hides: with unlike shares that of any kind, since the replica with the
    most micro-batches need not have it.
    """
    sums, last, handing = (_stacked([getattr(one, name) for one in alone]) for name in ("sums", "last", "handing"))
    sums, handing = sums.transpose(0, 2, 1), handing.transpose(0, 2, 1)
    whole, handed = (np.take_along_axis(part, order[..., np.newaxis], axis=1)[..., 1:] for part in (sums, handing))
    left = np.take_along_axis(last, order, axis=1)[..., np.newaxis]
    if mixed.any():
        width = np.array([one.parallel.tensor_size * one.parallel.data for one in plans])[mixed]
        held = np.take_along_axis(gpus, order, axis=1)[mixed]
        for part in (whole, handed, left):
            part[mixed] = of_any_stage(part[mixed], held, width)[:, np.newaxis]
        shared = np.array([one.parallel.shares is not None for one in plans])[:, np.newaxis]
        slowest = np.where(shared, backward.max(axis=1, keepdims=True), np.maximum.accumulate(backward, axis=1))
        backward = np.where(mixed[:, np.newaxis], slowest, backward)
    if not plans[0].overlaps:
        return np.asarray(whole + handed)
    model = plans[0].model
    tensors = [one.parallel.tensor_size for one in plans]
    buckets = {tensor: overlap.first_bucket_layers(model, tensor) for tensor in {*tensors}}
    first = np.array([buckets[tensor] for tensor in tensors])
    after = np.arange(1.0, plans[0].blocks.layers + 1) - first[:, np.newaxis, np.newaxis]
    hidden = filling(way.schedule) * backward[..., np.newaxis] * after
    return np.minimum(whole, np.maximum(whole - hidden, left)) + handed


def _fastest_first(times: Floats) -> tuple[Integers, Floats, Floats]:
    """[plans, kinds]: the kinds by the seconds of a layer, and what forward and backward passes take on them, which may
    divide."""
    fastest = np.argsort(times.sum(axis=2), axis=1, kind="stable")
    forward, backward = np.take_along_axis(np.maximum(times, TINY), fastest[..., np.newaxis], axis=1).transpose(2, 0, 1)
    return fastest, forward, backward


def _stacked(every: Sequence[Floats]) -> Floats:
    """Stack arrays, of which many are the same object, on a new first axis."""
    distinct = {id(one): one for one in every}
    place = {number: at for at, number in enumerate(distinct)}
    return np.stack([*distinct.values()])[[place[id(one)] for one in every]]


@lru_cache(maxsize=4096)
def _most_stages(micro_batches: Numbers, stages: int, groups: int) -> Floats:
    """[nodes + 1]: how many stages the replicas with the most micro-batches have on so many nodes with so many tensor
    groups each, at most, on the mean of these replicas, wherever the nodes are."""
    most = np.array(micro_batches) == max(micro_batches)
    of_nodes = np.tile(most, stages).reshape(-1, groups).sum(axis=1)
    return np.cumsum([0, *np.sort(of_nodes)[::-1]]) / most.sum()


@lru_cache(maxsize=4096)
def _passes(schedule: Schedule, chunks: int, stages: int, micro_batches: int, places: int) -> Floats:
    """[2, chunks, places]: forward and backward passes left; without end in the places behind the last stage."""
    left = passes_left(schedule, stages, chunks, micro_batches)
    found = np.full((2, len(left.forward), places), np.inf)
    found[..., :stages] = left.forward, left.backward
    return found


@lru_cache(maxsize=4096)
def _then(schedule: Schedule, chunks: int, stages: int, micro_batches: int) -> tuple[float, float]:
    """Forward and backward passes of all chunks that any stage has left after those in turn, if each chunk has as few
    as any."""
    left = passes_left(schedule, stages, chunks, micro_batches, schedule.definition.in_turn(stages, micro_batches))
    return chunks * float(left.forward.min()), chunks * float(left.backward.min())
