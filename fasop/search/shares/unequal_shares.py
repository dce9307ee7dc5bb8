"""Plans whose replicas lie on unlike nodes and take unequal shares of the batch.

Looked at are the node orders in which every stage has nodes of all kinds in the same numbers, so that each replica has
GPUs of one kind wherever the nodes allow it: there a replica on faster GPUs can do more. The layers per stage are first
those that are best without shares, then moved one by one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from conf.schema.values.partition import Partition
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from fasop.costs.training import PlacedTraining, Training
from fasop.frozen import replace
from fasop.partition.local_search import Worth
from fasop.search.bounds.gpu_classes import Way
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.order_search import Bounded, search_partitions
from fasop.search.plan import Plan
from fasop.search.search import PlanCollector
from fasop.search.space.candidates import MOST_REPLICAS, Candidates, divisors, fitting, sizes
from fasop.search.space.choices import Choices
from fasop.simulation.nodes import Nodes, times_on
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.replicas import Replicas
from fasop.simulation.ranks.shares import Replica, Shared, best_shares
from megatron_ext.contract.parallel_config import GATHERED, Recompute

MOST_PASSES = 2**11
"""Micro-batches of a replica, times stages: every one of them is simulated, many times."""
MOST_S = 5.0
"""CPU seconds."""
GAIN = 0.9
"""What unequal shares make of an iteration at best, beside what they make of its computation alone. (In 319 plans of a
front of 80 sets of nodes it was 0.99.)"""


_Row = tuple[float, int, Training, Nodes]
"""Seconds below which no plan is of some sizes and options, the number of their set of nodes, they, and its order."""


def explore_shares(
    training: Training, sets: Sequence[Sequence[NodeKind]], choices: Choices, keep: PlanCollector, until: float
) -> None:
    """Hands plans with unequal shares to `keep`, on these sets of nodes, the most promising first.

    Args:
        until: CPU seconds of this process, from which on nothing new is begun.

    Raises:
        SearchError: a profile has no costs for a tensor size.
    """
    if training.equal_only or training.parallel.zero == GATHERED:
        return
    until = min(until, time.process_time() + MOST_S)
    bounds = LowerBounds([*{kind.name: kind for kinds in sets for kind in kinds}.values()])
    looked: list[_Row] = []
    for number, kinds in enumerate(sets):
        if time.process_time() > until:
            break
        for least, one, order in _looked_at(training, kinds, choices, bounds, partial(_worth, keep, kinds)):
            looked.append((least, number, one, order))
    for (least, number, one, order), equal in _with_equal(sorted(looked, key=lambda row: row[:2]), sets, bounds):
        if time.process_time() > until:
            break
        kinds = sets[number]
        if not _worth(keep, kinds, least):
            continue
        gain = GAIN * (least - ending_of(one, kinds, bounds)) / _equal_seconds(one, kinds)
        if _worth(keep, kinds, gain * equal) and (group := fitting([one], order)) is not None:
            keep.add([*_plans(group, least, until, gain, partial(keep.worth, kinds))])


def _with_equal(
    rows: Sequence[_Row], sets: Sequence[Sequence[NodeKind]], bounds: LowerBounds
) -> Iterator[tuple[_Row, float]]:
    """Yield the rows, each with seconds below which none of its plans is with equal shares."""
    alike: dict[tuple[int, Way], list[int]] = defaultdict(list)
    for place, (_, number, one, _) in enumerate(rows):
        alike[number, Way.of(one.parallel)].append(place)
    equal = np.zeros(len(rows))
    for (number, way), places in alike.items():
        equal[places] = bounds.of([rows[place][2] for place in places], way, sets[number])
    yield from zip(rows, equal.tolist(), strict=True)


def _worth(keep: PlanCollector, kinds: Sequence[NodeKind], seconds: float) -> bool:
    return bool(keep.worth(kinds, np.array([seconds]))[0])


def _looked_at(
    training: Training,
    kinds: Sequence[NodeKind],
    choices: Choices,
    bounds: LowerBounds,
    worth: Callable[[float], bool],
) -> Iterator[tuple[float, Training, Nodes]]:
    """Plans on all these nodes without their partition, with seconds below which none of them is that are worth it."""
    present = [kind for kind in kinds if kind.group.count]
    if len(present) < 2:
        return
    quickest = Recompute.none if Recompute.none in choices.recompute else choices.recompute[0]
    for one in _sizes(training, present, choices):
        parallel = one.parallel
        if not worth(_busy_seconds(replace(one, parallel=replace(parallel, recompute=quickest)), present)):
            continue
        unit = [number for number, kind in enumerate(present) for _ in range(kind.group.count // parallel.pipeline)]
        order = Nodes(present, np.array([unit * parallel.pipeline]))
        for schedule, chunks in choices.ways:
            if not choices.runs(parallel, schedule, chunks, one.model, one.engine):
                continue
            if chunks > 1 and parallel.zero is not None:
                continue
            for variant in choices.variants(replace(parallel, schedule=schedule, chunks=chunks)):
                wanted = replace(one, parallel=variant)
                ending = ending_of(wanted, present, bounds)
                if (least := least_seconds(wanted, present, worth, ending)) is not None:
                    yield least, wanted, order


def _sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> Iterator[Training]:
    """Those of two or more replicas, of which each can have a share of its own, that are quick to simulate, and whose
    stages can have as many nodes of each kind."""
    stages = divisors(math.gcd(*(kind.group.count for kind in kinds)))
    tried = choices.pipeline or stages
    choices = replace(choices, pipeline=tuple(number for number in stages if number in tried))
    every = (sizes(training, kinds, choices, MOST_PASSES, uneven=uneven) for uneven in (False, True))
    for one in chain.from_iterable(every):
        parallel = one.parallel
        if 1 < parallel.data <= MOST_REPLICAS and parallel.micro_batches * parallel.pipeline <= MOST_PASSES:
            yield one


def least_seconds(
    one: Training, kinds: Sequence[NodeKind], worth: Callable[[float], bool], ending: float = 0.0
) -> float | None:
    """Seconds that an iteration takes at least, with whatever partition and shares, if each of these kinds of nodes has
    its part of every stage; None once they are not worth it.

    Of p stages let stage s have the part x_s of a replica's work F for a micro-batch, of which the part phi comes
    before other stages can begin: all of it, or the forward pass where the backward passes are in two parts. For n
    micro-batches the replica takes phi F (x_1 + … + x_(s-1)) + n F x_s at least, for every s; where all of these are
    equal, their largest is least, and that is phi F / (1 - (1 - phi / n)^p). Solved for n, this is how many
    micro-batches a replica has done by a given time at most, which all replicas together must do in the end. Then there
    are `ending` seconds.
    """
    parallel, stages = one.parallel, one.parallel.pipeline
    replicas = _replicas(one, kinds)
    needed = parallel.global_batch_size / parallel.micro_batch_size

    def done(seconds: float) -> float:
        return sum(count * _micro_batches(seconds / work, first, stages) for count, work, first in replicas)

    low, high = 0.0, max(work for _, work, _ in replicas)
    while done(high) < needed:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if done(middle) >= needed:
            high = middle
        elif worth(middle + ending):
            low = middle
        else:
            return None
    return low + ending if worth(low + ending) else None


def _busy_seconds(one: Training, kinds: Sequence[NodeKind]) -> float:
    """Do as `least_seconds`, if no replica ever waits."""
    parallel = one.parallel
    rate = sum(count * parallel.pipeline / work for count, work, _ in _replicas(one, kinds))
    return parallel.global_batch_size / parallel.micro_batch_size / rate


def _equal_seconds(one: Training, kinds: Sequence[NodeKind]) -> float:
    """Do as `least_seconds` of what replicas compute, if each takes as many micro-batches as every other one, or the
    slowest ones one more."""
    parallel = one.parallel
    needed = math.ceil(parallel.global_batch_size / parallel.micro_batch_size / parallel.data)
    stages = parallel.pipeline
    return max(
        work * (first / (1 - (1 - first / needed) ** stages) if first else needed / stages)
        for _, work, first in _replicas(one, kinds)
    )


def ending_of(one: Training, kinds: Sequence[NodeKind], bounds: LowerBounds) -> float:
    """Seconds that follow at least on the chains of `least_seconds`: none are known where these do not end with the
    first stage's last backward pass, before its weight gradients."""
    split = one.parallel.schedule.definition.splits_backward
    return 0.0 if split else bounds.ending(one, [kind for kind in kinds if kind.group.count])


def _replicas(one: Training, kinds: Sequence[NodeKind]) -> list[tuple[float, float, float]]:
    """Return of each kind of nodes how many replicas lie on it, their work for a micro-batch in seconds, and which part
    of it comes before other stages can begin."""
    parallel = one.parallel
    counts, stages = one.blocks.counts[:, -1].tolist(), parallel.pipeline
    replicas = []
    for kind in kinds:
        times = times_on(kind, one)
        parts = [(1, times.embedding), (1, times.head), *zip(counts, times.layers, strict=True)]
        work = sum(count * (part.forward + part.backward) for count, part in parts)
        first = 1.0
        if parallel.schedule.definition.splits_backward:
            each = [part.forward / (part.forward + part.backward) for _, part in parts if part.forward + part.backward]
            first = min(each, default=1.0)
        if parallel.schedule.definition.has_chunks:
            first = 0.0
        replicas.append((kind.group.count * kind.gpus / parallel.tensor_size / stages, work, first))
    return replicas


def _micro_batches(time: float, first: float, stages: int) -> float:
    """That a replica does in a time, in units of its work for one."""
    if first == 0:
        return time * stages
    if time <= first:
        return 0.0
    return float(first / (1 - (1 - first / time) ** (1 / stages)))


def _plans(group: Candidates, least: float, until: float, gain: float, worth: Worth) -> Iterator[Plan]:
    """Yield the best plan that is found of each candidate, if its shares are unequal, it fits into memory, and its
    seconds are worth it. Looked at is what would be if unequal shares gained that much."""

    def may(seconds: Floats) -> NDArray[np.bool_]:
        return worth(gain * seconds)

    some = Bounded.of(group, worth=may)
    some = some.take(np.nonzero(may(some.proved))[0])
    group = some.group
    if not len(group):
        return
    partitions, equal = search_partitions(some, worth=may)
    for column in np.nonzero(may(equal))[0].tolist():
        nodes = [group.kinds[kind] for kind in group.orders[column]]
        training = group.training(column)
        order = tuple(kind.name for kind in nodes)
        training = replace(training, parallel=replace(training.parallel, node_order=order))
        shares = _Shares(PlacedTraining(training=training, partition=Partition(()), nodes=nodes))
        layers = _moved(shares, partitions[:, column].tolist(), until)
        counts, seconds = shares.best(layers)
        if len(set(counts)) > 1 and worth(np.array([seconds]))[0]:
            parallel = replace(training.parallel, partition=layers, shares=counts)
            placed = PlacedTraining(
                training=replace(training, parallel=parallel), partition=Partition(layers), nodes=nodes
            )
            plan = plan_if_it_fits(placed, least)
            if plan is not None:
                yield plan


class _Shares:
    """The best shares of a plan with each partition."""

    def __init__(self, placed: PlacedTraining) -> None:
        self._replicas, self._parallel = Replicas(placed), placed.training.parallel
        self._known: dict[tuple[int, ...], Shared] = {}

    def best(self, layers: tuple[int, ...]) -> Shared:
        if layers not in self._known:
            parallel, durations = self._parallel, self._replicas.of(layers)
            kinds = {id(one): Replica(str(parallel.schedule), parallel.chunks, one) for one in durations}
            self._known[layers] = best_shares([kinds[id(one)] for one in durations], sum(parallel.micro_batches_of))
        return self._known[layers]


def _moved(shares: _Shares, layers: Sequence[int], until: float) -> tuple[int, ...]:
    """The layers of each part from which no move of one to a neighbour gains, if there is the time for it."""
    best, moved = tuple(layers), True
    while moved:
        moved = False
        for here in range(len(layers) - 1):
            for step in (1, -1):
                other = [*best]
                other[here], other[here + 1] = other[here] - step, other[here + 1] + step
                if min(other) < 0 or time.process_time() > until:
                    continue
                if shares.best(tuple(other)).seconds < shares.best(best).seconds:
                    best, moved = tuple(other), True
    return best


def plan_if_it_fits(placed: PlacedTraining, least: float) -> Plan | None:
    """Return the plan as a search shows it; None if it does not fit into memory with these shares."""
    predicted = predict_plan(placed)
    if any(stage.memory_gib > stage.limit_gib for stage in predicted.stages):
        return None
    return Plan(
        training=placed.training,
        partition=placed.partition,
        nodes=placed.nodes,
        total=predicted.iteration_s,
        known_parts=predicted.parts,
        bound=min(least, predicted.iteration_s),
        basis=predicted.basis,
        pipelines=None,
    )
