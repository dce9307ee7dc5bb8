"""Plans whose replicas lie on unlike nodes and take unequal shares of the batch.

Looked at are the node orders in which every stage has nodes of all kinds in the same numbers, so that each replica has
GPUs of one kind wherever the nodes allow it: there a replica on faster GPUs can do more. The layers per stage are first
those that are best without shares, then moved one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from conf.schema.parallel import Schedule
from conf.schema.partition import NodeOrder, Partition, Shares
from fasop.costs.arrays import Integers
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.training import PlacedTraining, Training
from fasop.search.candidates import Candidates, divisors, fitting, tensor_sizes
from fasop.search.choices import Choices
from fasop.search.order_search import Bounded, search_partitions
from fasop.search.plan import Plan
from fasop.simulation.iteration import GRADIENTS, NORM
from fasop.simulation.loaded import Parts
from fasop.simulation.on_nodes import Nodes, times_on
from fasop.simulation.predict import Prediction, durations_alone, durations_of, predict_plan
from fasop.simulation.replicas import of_replicas
from fasop.simulation.shares import Replica, Shared, best_shares

MOST_REPLICAS = 1024
MOST_PASSES = 2**11
"""Micro-batches of a replica, times stages: every one of them is simulated, many times."""
MOST_S = 5.0
"""CPU seconds."""
WORTH = 0.999
"""Of the time of a plan without shares: one with them that gains less is not worth it."""


def best_with_shares(
    training: Training, sets: Sequence[Sequence[NodeKind]], choices: Choices, seconds: float, until: float
) -> Plan | None:
    """The fastest plan with unequal shares on one of these sets of nodes; None if none takes less than `seconds`.

    Args:
        until: CPU seconds of this process, from which on nothing new is begun.

    Raises:
        SearchError: a profile has no costs for a tensor size.
    """
    if training.megatron_lm:
        return None
    found, until = None, min(until, time.process_time() + MOST_S)
    looked = []
    for row in (row for kinds in sets for row in _looked_at(training, kinds, choices)):
        looked.append(row)
        if time.process_time() > until:
            break
    for least, one, order in sorted(looked, key=lambda row: row[0]):
        if least >= seconds * WORTH or time.process_time() > until:
            break
        group = fitting([one], order)
        for plan in [] if group is None else _plans(group, seconds * WORTH, least, until):
            if plan.total < seconds * WORTH:
                found, seconds = plan, plan.total / WORTH
    return found


def _looked_at(
    training: Training, kinds: Sequence[NodeKind], choices: Choices
) -> Iterator[tuple[float, Training, Nodes]]:
    """Plans on all these nodes without their partition, with seconds below which none of them is."""
    present = [kind for kind in kinds if kind.group.count]
    if len(present) < 2:
        return
    for one in _sizes(training, present, choices):
        parallel = one.parallel
        if any(kind.group.count % parallel.pipeline for kind in present):
            continue
        unit = [number for number, kind in enumerate(present) for _ in range(kind.group.count // parallel.pipeline)]
        order = Nodes(present, np.array([unit * parallel.pipeline]))
        for schedule, chunks in choices.ways:
            if not choices.runs(parallel, schedule, chunks, one.model, one.engine):
                continue
            for variant in choices.variants(replace(parallel, schedule=schedule, chunks=chunks)):
                wanted = replace(one, parallel=variant)
                yield least_seconds(wanted, present), wanted, order


def _sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> Iterator[Training]:
    """Every division of all GPUs into two or more replicas, and of the batch into as many micro-batches at least; its
    shares are as even as they can be."""
    parallel, gpus = training.parallel, gpus_of(kinds)
    for tensor in tensor_sizes(training, kinds):
        for data in divisors(gpus // tensor)[1:]:
            if data > MOST_REPLICAS:
                break
            pipeline = gpus // tensor // data
            for size in divisors(parallel.global_batch_size):
                count = parallel.global_batch_size // size
                if count < data or count * pipeline > MOST_PASSES * data or pipeline > training.blocks.most_stages:
                    continue
                sized = replace(
                    parallel,
                    tensor=tensor,
                    data=data,
                    pipeline=pipeline,
                    micro_batch_size=size,
                    shares=str(Shares((1,) * data).fitted(count)),
                    partition=None,
                    node_order=None,
                )
                if choices.tries(sized):
                    yield replace(training, parallel=sized)


def least_seconds(one: Training, kinds: Sequence[NodeKind]) -> float:
    """Seconds that an iteration takes at least, with whatever partition and shares, if each of these kinds of nodes has
    its part of every stage.

    Of p stages let stage s have the part x_s of a replica's work F for a micro-batch, of which the part phi comes
    before other stages can begin: all of it, or the forward pass where the backward passes are in two parts. For n
    micro-batches the replica takes phi F (x_1 + … + x_(s-1)) + n F x_s at least, for every s; where all of these are
    equal, their largest is least, and that is phi F / (1 - (1 - phi / n)^p). Solved for n, this is how many
    micro-batches a replica has done by a given time at most, which all replicas together must do in the end.
    """
    parallel = one.parallel
    counts, stages = one.blocks.counts[:, -1].tolist(), parallel.pipeline
    replicas = []
    for kind in kinds:
        times = times_on(kind, one)
        parts = [(1, times.embedding), (1, times.head), *zip(counts, times.layers, strict=True)]
        work = sum(count * (part.forward + part.backward) for count, part in parts)
        first = 1.0
        if parallel.schedule is Schedule.zb_h1:
            each = [part.forward / (part.forward + part.backward) for _, part in parts if part.forward + part.backward]
            first = min(each, default=1.0)
        if parallel.schedule is Schedule.interleaved:
            first = 0.0
        replicas.append((kind.group.count * kind.gpus / parallel.tensor_size / stages, work, first))
    needed = parallel.global_batch_size / parallel.micro_batch_size

    def done(seconds: float) -> float:
        return sum(count * _micro_batches(seconds / work, first, stages) for count, work, first in replicas)

    low, high = 0.0, max(work for _, work, _ in replicas)
    while done(high) < needed:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if done(middle) < needed else (low, middle)
    return low


def _micro_batches(time: float, first: float, stages: int) -> float:
    """That a replica does in a time, in units of its work for one."""
    if first == 0:
        return time * stages
    if time <= first:
        return 0.0
    return float(first / (1 - (1 - first / time) ** (1 / stages)))


def _plans(group: Candidates, limit: float, least: float, until: float) -> Iterator[Plan]:
    """Of each candidate the best that is found, if it takes less than `limit`."""
    bounded = Bounded.of(group)
    partitions, _ = search_partitions(bounded)
    for column in range(len(group)):
        nodes = [group.kinds[kind] for kind in group.orders[column]]
        training = group.training(column)
        order = str(NodeOrder(tuple(kind.name for kind in nodes)))
        training = replace(training, parallel=replace(training.parallel, node_order=order))
        placed = _moved(
            PlacedTraining(training=training, partition=Partition(()), nodes=nodes), partitions[:, column], until
        )
        shared = _shared(placed)
        if shared.seconds < limit and len(set(shared.counts)) > 1:
            plan = _plan(placed, shared, group, column, least)
            if plan is not None:
                yield plan


def _with(placed: PlacedTraining, layers: Sequence[int]) -> PlacedTraining:
    partition = Partition(tuple(layers))
    parallel = replace(placed.training.parallel, partition=str(partition))
    return replace(placed, training=replace(placed.training, parallel=parallel), partition=partition)


def _shared(placed: PlacedTraining) -> Shared:
    """The best shares of a plan with its partition."""
    parallel = placed.training.parallel
    durations = of_replicas(placed, durations_of(placed)[0], durations_alone(placed))
    kinds = {id(one): Replica(str(parallel.schedule), parallel.chunks, one) for one in durations}
    return best_shares([kinds[id(one)] for one in durations], sum(parallel.micro_batches_of))


def _moved(placed: PlacedTraining, layers: Integers, until: float) -> PlacedTraining:
    """With the layers of each part from which no move of one to a neighbour gains, if there is the time for it."""
    best = _with(placed, layers.tolist())
    if len(layers) == 1:
        return best
    seconds, moved = _shared(best).seconds, True
    while moved:
        moved = False
        for here in range(len(layers) - 1):
            for step in (1, -1):
                parts = [*best.partition.layers]
                parts[here], parts[here + 1] = parts[here] - step, parts[here + 1] + step
                if min(parts) < 0 or time.process_time() > until:
                    continue
                other = _with(placed, parts)
                if (found := _shared(other).seconds) < seconds:
                    best, seconds, moved = other, found, True
    return best


def _plan(placed: PlacedTraining, shared: Shared, group: Candidates, column: int, least: float) -> Plan | None:
    """As a search shows it; None if it does not fit into memory with these shares."""
    training = placed.training
    parallel = replace(training.parallel, shares=str(Shares(shared.counts)))
    whole = replace(placed, training=replace(training, parallel=parallel))
    predicted = predict_plan(whole)
    if any(stage.memory_gib > stage.limit_gib for stage in predicted.stages):
        return None
    return Plan(
        training=whole.training,
        partition=whole.partition,
        nodes=whole.nodes,
        total=predicted.iteration_s,
        parts=_parts(predicted),
        bound=min(least, predicted.iteration_s),
        basis=predicted.basis,
        pipelines=group.pipelines.take(np.array([column])),
    )


def _parts(predicted: Prediction) -> Parts:
    ends = {name: [event.end for event in predicted.events if event.kind == name] for name in (GRADIENTS, NORM)}
    computed = max(event.end for event in predicted.events if event.micro_batch >= 0)
    summed = max([computed, *ends[GRADIENTS]])
    known = max(ends[NORM])
    seconds = {
        "total": predicted.iteration_s,
        "pipeline": predicted.iteration_s - (known - computed),
        "sums": summed - computed,
        "embedding": known - summed,
        "optimizer": max(predicted.durations.optimizer),
    }
    return Parts(**{name: np.array([value]) for name, value in seconds.items()})
