"""Plans with islands: rooms of nodes that train by themselves and take a common step every so many iterations.

Islands have the same stages, those that are best for one of the rooms alone, with as many pipelines as their own nodes
make; or each has the best for its own room. Their shares of the batch are such that they end together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np

from conf.schema.values.partition import Shares
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_table import LinkTable
from fasop.costs.parallelism import Parallelism
from fasop.costs.profiles.steps import Operation
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan
from fasop.search.search import Best, explore
from fasop.search.shares.unequal_shares import MOST_PASSES, plan_if_it_fits
from fasop.search.space.candidates import Space, divisors
from fasop.search.traffic import bytes_of_weights
from fasop.simulation.islands import by_island, durations_of
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.shares import best_shares, replicas_of
from megatron_ext.contract.layout import lcm
from megatron_ext.contract.parallel_config import BUCKET_BYTES

Rooms = Sequence[Sequence[NodeKind]]

KEPT, TRIED = 30, 12
"""Plans that are kept of each room by itself, and those whose stages are tried in all rooms: of each tensor size,
pipeline, micro-batch and schedule the fastest first, for common steps may take another one less time."""
SLOW = 4.0
"""How many times as long bytes take between rooms as within them where islands are proposed unasked."""
EVERY = (10, 20, 50, 100, 200, 500)
"""Iterations between two common steps that are proposed; rarer ones cost more quality."""
MOST_MOVES = 32
STEP = 0.05
"""The part of an iteration that common steps may add, so that fewer of them gain little."""


def island_plans(inputs: Inputs, top: int, until: float, *, slow_only: bool = False) -> list[Plan]:
    """Returns the fastest plans with islands that step together every `inputs.training.sync_every` iterations.

    Args:
        until: CPU seconds of this process, from which on nothing new is begun.
        slow_only: only rooms with links between them that are much slower than those within.
    """
    best = Best(top, inputs.fault)
    for rooms in parted(inputs.kinds, slow_only=slow_only):
        for placed in _placed(inputs, rooms, until):
            if time.process_time() > until and best.plans:
                break
            best.add([plan for plan in [_plan(placed)] if plan is not None])
        for placed in _of_their_own(inputs, rooms, until):
            if time.process_time() > until and best.plans:
                break
            best.add([plan for plan in [plan_if_it_fits(_balanced(placed), 0.0)] if plan is not None])
    return best.plans


def proposed(inputs: Inputs, than: float, until: float) -> Plan | None:
    """Returns the fastest plan with islands in rooms that slow links join, with as few iterations between two common
    steps as these allow; None if it takes as long as `than` seconds or there are no such rooms."""
    every = [replace(inputs, training=replace(inputs.training, sync_every=number)) for number in EVERY]
    best = island_plans(every[len(EVERY) // 2], 1, until, slow_only=True)
    for one in best:
        alone = _again(one, 10**9).total
        plans = [_again(one, number) for number in EVERY]
        plan = next((plan for plan in plans if plan.total <= (1 + STEP) * alone), plans[-1])
        return plan if plan.total < than else None
    return None


def parted(kinds: Sequence[NodeKind], *, slow_only: bool = False) -> Iterator[Rooms]:
    """Yields ways to part nodes into rooms: groups that only slower links join, or equal parts of a single group."""
    present = [kind for kind in kinds if kind.group.count]
    if len(present) == 1:
        (kind,) = present
        for rooms in [] if slow_only else divisors(kind.group.count)[1:]:
            yield [[replace(kind, group=replace(kind.group, count=kind.group.count // rooms))]] * rooms
        return
    table = LinkTable.of(
        present, [1.0] * len(present), size := float(BUCKET_BYTES), Exchange(Operation.all_reduce, 2, size)
    )
    rate = np.maximum(table.leaving, table.entering)
    rate = np.maximum(rate, rate.T)
    pairs, seen = [*combinations(range(len(present)), 2)], set[tuple[tuple[int, ...], ...]]()
    for slow in sorted({float(rate[pair]) for pair in pairs}):
        joined = _joined(len(present), [pair for pair in pairs if rate[pair] < slow])
        apart = [(a, b) for one, other in combinations(joined, 2) for a in one for b in other]
        if len(joined) == 1 or joined in seen:
            continue
        seen.add(joined)
        if slow_only and min(rate[a, b] / max(rate[a, a], rate[b, b]) for a, b in apart) < SLOW:
            continue
        yield [[present[number] for number in room] for room in joined]


def _joined(count: int, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers up to `count`, those together that pairs join."""
    room = [*range(count)]
    for a, b in pairs:
        room = [room[a] if one == room[b] else one for one in room]
    return tuple(tuple(number for number in range(count) if room[number] == one) for one in dict.fromkeys(room))


def _placed(inputs: Inputs, rooms: Rooms, until: float) -> Iterator[PlacedTraining]:
    """Yield what is tried of these rooms, with about equal shares."""
    alone = [_best_alone(inputs, room, rooms, until) for room in rooms]
    if not all(alone):
        return
    seen = set()
    for plan in chain.from_iterable(alone):
        own = plan.training.parallel
        cut = replace(own, data=1, shares=None, node_order=None, global_batch_size=own.micro_batch_size)
        width, batch = own.tensor_size * own.pipeline, inputs.training.parallel.global_batch_size
        islands = tuple(gpus_of(room) // width for room in rooms)
        count = batch // own.micro_batch_size
        if (
            cut in seen
            or batch % own.micro_batch_size
            or sum(islands) > count
            or own.pipeline * count > MOST_PASSES * sum(islands)
        ):
            continue
        seen.add(cut)
        if any(gpus_of(room) % width or any(kind.gpus % own.tensor_size for kind in room) for room in rooms):
            continue
        if inputs.choices.data is not None and sum(islands) not in inputs.choices.data:
            continue
        nodes = [node for plans in alone for node in _order(plans, plan)]
        parallel = replace(
            cut,
            data=sum(islands),
            islands=islands,
            shares=None if count % sum(islands) == 0 else Shares.even(count, sum(islands)).numbers,
            node_order=tuple(node.name for node in nodes),
            global_batch_size=batch,
        )
        yield PlacedTraining(
            training=replace(inputs.training, parallel=parallel), partition=plan.partition, nodes=nodes
        )


def _of_their_own(inputs: Inputs, rooms: Rooms, until: float) -> Iterator[PlacedTraining]:
    """Yield what is tried of these rooms where each takes one of its own plans: of those that share what all islands
    must, the fastest of each tensor size and pipeline."""
    alone = [_best_alone(inputs, room, rooms, until) for room in rooms]
    by_way: list[dict[tuple[object, ...], dict[tuple[int, int], Plan]]] = []
    for room, plans in zip(rooms, alone, strict=True):
        found: dict[tuple[object, ...], dict[tuple[int, int], Plan]] = {}
        for plan in sorted(plans, key=lambda plan: plan.total):
            p = plan.training.parallel
            if p.world_size == gpus_of(room) and p.chunks == 1 and p.alike:
                way = (p.micro_batch_size, p.schedule, p.recompute, p.sequence_parallel)
                found.setdefault(way, {}).setdefault((p.tensor_size, p.pipeline), plan)
        by_way.append(found)
    batch = inputs.training.parallel.global_batch_size
    shared = [way for way in by_way[0] if all(way in found for found in by_way)]
    for chosen in chain.from_iterable(product(*(found[way].values() for found in by_way)) for way in shared):
        cut = [plan.training.parallel for plan in chosen]
        data, count = sum(p.data for p in cut), batch // cut[0].micro_batch_size
        if (
            batch % cut[0].micro_batch_size
            or data > count
            or len({(p.tensor, plan.partition) for p, plan in zip(cut, chosen, strict=True)}) == 1
            or (inputs.choices.data is not None and data not in inputs.choices.data)
        ):
            continue
        nodes = [node for plan in chosen for node in plan.nodes]
        parallel = replace(
            cut[0],
            data=data,
            pipeline=max(p.pipeline for p in cut),
            tensor=lcm([p.tensor_size for p in cut]),
            partition=None,
            islands=tuple(p.data for p in cut),
            own_plans=tuple(
                replace(p, partition=plan.partition.layers, node_order=None)
                for p, plan in zip(cut, chosen, strict=True)
            ),
            node_order=tuple(node.name for node in nodes),
            global_batch_size=batch,
        )
        speeds = [p.global_batch_size / plan.total for p, plan in zip(cut, chosen, strict=True)]
        counts = [max(p.data, round(count * one / sum(speeds))) for p, one in zip(cut, speeds, strict=True)]
        largest = max(range(len(counts)), key=lambda number: counts[number] - cut[number].data)
        counts[largest] += count - sum(counts)
        if counts[largest] >= cut[largest].data:
            longest = max(chosen, key=lambda plan: len(plan.partition.layers)).partition
            yield PlacedTraining(
                training=replace(inputs.training, parallel=_with_counts(parallel, counts)),
                partition=longest,
                nodes=nodes,
            )


def _with_counts(parallel: Parallelism, counts: Sequence[int]) -> Parallelism:
    """The plan whose islands take so many micro-batches, each evenly among its replicas."""
    size, shares, own_plans = parallel.micro_batch_size, list[int](), list[Parallelism]()
    for own, count in zip(parallel.own_plans, counts, strict=True):
        taken = Shares.even(count, own.data).numbers if count % own.data else (count // own.data,) * own.data
        shares += taken
        even = len({*taken}) == 1
        own_plans.append(replace(own, shares=None if even else taken, global_batch_size=count * size))
    return replace(parallel, own_plans=tuple(own_plans), shares=tuple(shares) if len({*shares}) > 1 else None)


def _balanced(placed: PlacedTraining) -> PlacedTraining:
    """The plan of islands of their own that end as nearly together as a few moves of micro-batches, one of each replica
    of the slowest, can have them."""
    own = placed.training.parallel.own_plans
    counts, times = [sum(one.micro_batches_of) for one in own], _seconds(placed)
    for _ in range(MOST_MOVES):
        slowest, fastest = (pick(range(len(own)), key=times.__getitem__) for pick in (max, min))
        moved = own[slowest].data
        if counts[slowest] < 2 * moved:
            break
        tried = [count + moved * ((number == fastest) - (number == slowest)) for number, count in enumerate(counts)]
        other = replace(
            placed, training=replace(placed.training, parallel=_with_counts(placed.training.parallel, tried))
        )
        if max(other_times := _seconds(other)) >= max(times):
            break
        placed, counts, times = other, tried, other_times
    return placed


def _seconds(placed: PlacedTraining) -> list[float]:
    """An iteration of each island by itself."""
    return [predict_plan(island).iteration_s for island in by_island(placed)]


def _best_alone(inputs: Inputs, room: Sequence[NodeKind], rooms: Rooms, until: float) -> list[Plan]:
    """The fastest plans of a room for its part of the batch."""
    every = [sum(kind.gpus * kind.group.count * kind.gpu.bf16_tflops for kind in one) for one in rooms]
    own = sum(kind.gpus * kind.group.count * kind.gpu.bf16_tflops for kind in room)
    batch = inputs.training.parallel.global_batch_size
    unit = max(one for one in divisors(batch) if one & (one - 1) == 0 and (one == 1 or 8 * one <= batch))
    part = max(1, round(batch * own / sum(every) / unit)) * unit
    training = replace(inputs.training, parallel=replace(inputs.training.parallel, global_batch_size=part))
    choices = replace(inputs.choices, data=None, sharded_optimizer=(False,))
    best = Best(KEPT)
    try:
        explore([Space(training, room, choices, uneven=uneven) for uneven in (False, True)], best, until=until)
    except SearchError:  # a profile has no costs of it
        return []
    shapes: Counter[tuple[object, ...]] = Counter()
    found: list[tuple[int, Plan]] = []
    for plan in best.plans:
        p = plan.training.parallel
        shape = (p.tensor_size, p.pipeline, p.micro_batch_size, p.schedule)
        if all(plan.partition.layers[1:-1]):
            found.append((shapes[shape], plan))
            shapes[shape] += 1
    return [plan for _, plan in sorted(found, key=lambda row: row[0])[:TRIED]]


def _order(plans: Sequence[Plan], like: Plan) -> Sequence[NodeKind]:
    """The nodes of a room in the order of its best plan with as many stages."""
    p = like.training.parallel

    def unlike(plan: Plan) -> bool:
        q = plan.training.parallel
        return (q.tensor_size, q.pipeline) != (p.tensor_size, p.pipeline)

    return min(plans, key=unlike).nodes


def _plan(placed: PlacedTraining) -> Plan | None:
    """Return the plan with the best shares; None if it does not fit into memory."""
    parallel = placed.training.parallel
    durations, count = durations_of(placed)(placed.partition.layers), sum(parallel.micro_batches_of)
    if parallel.shares is None and all(one == durations[0] for one in durations):
        return plan_if_it_fits(placed, 0.0)
    counts = best_shares(replicas_of(parallel, durations), count).counts
    parallel = replace(parallel, shares=counts if len({*counts}) > 1 else None)
    return plan_if_it_fits(replace(placed, training=replace(placed.training, parallel=parallel)), 0.0)


def _again(plan: Plan, every: int) -> Plan:
    """The plan with common steps every so many iterations."""
    placed = replace(plan, training=replace(plan.training, sync_every=every))
    again = plan_if_it_fits(placed, 0.0)
    assert again is not None
    return again


def in_words(plan: Plan) -> str:
    """Says what islands a plan has."""
    islands, parallel = plan.training.islands, plan.training.parallel
    names: list[str] = []
    rank = 0
    node_of = [node.name for node in plan.nodes for _ in range(node.gpus)]
    width = parallel.tensor_size * parallel.pipeline
    for ranks in [own.world_size for own in parallel.own_plans] or [size * width for size in islands]:
        names.append("+".join(dict.fromkeys(node_of[rank : rank + ranks])))
        rank += ranks
    step = plan.total - _again(plan, 10**9).total
    sent = 2 * (len(islands) - 1) * bytes_of_weights(by_island(plan)) / plan.training.sync_every
    return (
        f"{len(islands)} islands ({', '.join(names)}) train by themselves and take a common step every "
        f"{plan.training.sync_every} iterations, which adds {step * 1e3:.1f} ms to each; they send each other "
        f"{sent / 1e6:,.1f} MB an iteration"
    )
