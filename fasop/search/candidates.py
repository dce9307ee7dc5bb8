"""Everything that a search looks at: sizes and node orders that are possible and fit into memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from conf.schema.experiment import Parallel, Recompute, Schedule
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.layers import measured_tensor_sizes
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.partition.dominance import distinct, never_worse
from fasop.partition.local_search import feasible
from fasop.search import orders
from fasop.search.choices import Choices
from fasop.search.lower_bound import Floors, Way
from fasop.simulation.on_nodes import Nodes, on_nodes, times_on
from fasop.simulation.pipelines import Pipelines, joined

MOST_MICRO_BATCHES = 2**12
"""Of a replica in an iteration: every one of them is simulated."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Of the same sizes and schedule, on nodes with the same numbers of GPUs: one for each option and node order that
    makes a difference.
    """

    options: Sequence[Training]
    kinds: Sequence[NodeKind]
    option: Integers
    """[candidates]: the number of each one's option."""
    orders: Integers
    """[candidates, nodes]: the kind of each node."""
    pipelines: Pipelines

    def __len__(self) -> int:
        return len(self.orders)

    @property
    def layers(self) -> int:
        return self.options[0].model.layers

    def training(self, column: int) -> Training:
        """Of one candidate."""
        return self.options[int(self.option[column])]

    def take(self, columns: Integers) -> Candidates:
        return replace(
            self,
            option=self.option[columns],
            orders=self.orders[columns],
            pipelines=self.pipelines.take(columns),
        )


class Space:
    """Every way to cut a training over all of some nodes: sizes with a schedule, by number.

    Only what is asked for is built. `floors` keeps what many sets of the same nodes have in common.
    """

    def __init__(
        self, training: Training, kinds: Sequence[NodeKind], choices: Choices, floors: Floors | None = None
    ) -> None:
        self.kinds = [kind for kind in kinds if kind.group.count]
        self._training, self._choices = training, choices
        self._sized = [*sizes(training, self.kinds, choices)]
        self._cuts: list[tuple[int, Schedule, int]] = []
        floors, least = floors or Floors(self.kinds), []
        for schedule, chunks in choices.ways:
            some = [number for number, one in enumerate(self._sized) if self._runs(one, schedule, chunks)]
            self._cuts += [(number, schedule, chunks) for number in some]
            plans = [self._sized[number] for number in some]
            ways = [Way(schedule, chunks, recompute) for recompute in choices.recompute]
            least.append(np.min([floors.of(plans, way, self.kinds) for way in ways], axis=0))
        self.floors: Floats = np.concatenate(least)
        """Seconds below which no plan of each number is, on whatever order of the nodes."""

    def _runs(self, one: Training, schedule: Schedule, chunks: int) -> bool:
        return self._choices.runs(one.parallel, schedule, chunks, one.model, one.engine)

    def __len__(self) -> int:
        return len(self._cuts)

    @property
    def nodes(self) -> list[int]:
        """How many of each kind."""
        return [kind.group.count for kind in self.kinds]

    @cached_property
    def few(self) -> bool:
        """Whether all node orders are among the first."""
        return orders.few(self.nodes)

    @cached_property
    def first(self) -> list[Nodes]:
        """The node orders that are looked at in any case."""
        if self.few:
            return self.laid(orders.orders(self.nodes))
        fastest = self._fastest()
        found = orders.starts([self.nodes[kind] for kind in fastest])
        return self.laid(np.array(fastest)[found])

    def _fastest(self) -> list[int]:
        """The kinds, by the time of a layer."""
        times = [times_on(kind, self._sized[0]).layer for kind in self.kinds]
        return sorted(range(len(times)), key=lambda kind: times[kind].forward + times[kind].backward)

    def laid(self, every: Integers) -> list[Nodes]:
        """Node orders, those together that have the same numbers of GPUs in each place."""
        shapes = np.array([kind.gpus for kind in self.kinds])[every]
        _, number = np.unique(shapes, axis=0, return_inverse=True)
        return [Nodes(self.kinds, every[number.reshape(-1) == i]) for i in range(number.max() + 1)]

    def built(self, number: int, nodes: Sequence[Nodes]) -> list[Candidates]:
        """All options in these orders that fit into memory with some partition, and are worth a look."""
        place, schedule, chunks = self._cuts[number]
        sized = self._sized[place]
        parallel = replace(sized.parallel, schedule=schedule, chunks=chunks)
        variants = [replace(sized, parallel=variant) for variant in self._choices.variants(parallel)]
        wanted = [one for one in variants if _shares_sequence(one)]
        return [group for some in nodes if (group := fitting(wanted, some)) is not None]

    @property
    def groups(self) -> Iterator[Candidates]:
        """All that fit, in the first orders."""
        return (group for number in range(len(self)) for group in self.built(number, self.first))


def space(training: Training, kinds: Sequence[NodeKind], choices: Choices | None = None) -> Space:
    """All nodes of these kinds.

    `training` gives the model and the global batch, and without `choices` also the schedule and all that is no size.

    Raises:
        SearchError: no sizes are possible, or nothing fits into memory, with what would help.
    """
    choices = choices or Choices.of(training.parallel)
    found = Space(training, kinds, choices)
    if _fits(found):
        return found
    if any(one.parallel.micro_batches > MOST_MICRO_BATCHES for one in sizes(training, kinds, choices, math.inf)):
        raise SearchError(_too_many_micro_batches(training.parallel.global_batch_size, gpus_of(kinds)))
    if not len(found):
        raise SearchError(_no_sizes(training, kinds, choices))
    raise SearchError(_nothing_fits(training, kinds, choices))


def _fits(space: Space) -> bool:
    return any(True for _ in space.groups)


def sizes(
    training: Training, kinds: Sequence[NodeKind], choices: Choices | None = None, most: float = MOST_MICRO_BATCHES
) -> Iterator[Training]:
    """Every division of all GPUs and of the batch, in increasing order of tensor, data and micro-batch size.

    A tensor group lies inside a node, and was measured where the model was. A pipeline has no more stages than layers
    and one each for embedding and head. Options are as in `training`. A replica has at most so many micro-batches.
    """
    model, parallel = training.model, training.parallel
    gpus = gpus_of(kinds)
    for tensor in tensor_sizes(training, kinds):
        for data in divisors(gpus // tensor):
            pipeline = gpus // tensor // data
            if parallel.global_batch_size % data or pipeline > model.layers + 2:
                continue
            for micro_batch_size in divisors(parallel.global_batch_size // data):
                sized = replace(
                    parallel,
                    tensor=tensor,
                    data=data,
                    pipeline=pipeline,
                    micro_batch_size=micro_batch_size,
                    partition=None,
                    node_order=None,
                )
                if sized.micro_batches <= most and (choices is None or choices.tries(sized)):
                    yield replace(training, parallel=sized)


def tensor_sizes(training: Training, kinds: Sequence[NodeKind]) -> list[int]:
    """Those that fit the model and the nodes, and that every profile of the model has."""
    model = training.model
    measured = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
    return [
        tensor
        for tensor in divisors(min(kind.gpus for kind in kinds))
        if model.heads % tensor == 0
        and all(kind.gpus % tensor == 0 for kind in kinds)
        and all(known is None or tensor in known for known in measured)
    ]


def divisors(number: int) -> list[int]:
    """In increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _shares_sequence(training: Training) -> bool:
    parallel = training.parallel
    return not parallel.sequence_parallel or training.model.sequence_length % parallel.tensor == 0


def fitting(options: Sequence[Training], nodes: Nodes) -> Candidates | None:
    """A plan with each option, in those orders in which it fits into memory; without what an earlier option is never
    worse than, and without twins. None if there is nothing left.
    """
    lines: list[Pipelines] = []
    columns: list[Integers] = []
    for one in options:
        line = on_nodes(one, nodes)
        useful = feasible(line, one.model.layers)
        for earlier in lines:
            useful &= ~never_worse(earlier, line, one.model.layers)
        lines.append(line)
        some = np.nonzero(useful)[0]
        columns.append(some[distinct(line.take(some))] if len(some) else some)
    if not any(map(len, columns)):
        return None
    return Candidates(
        options=options,
        kinds=nodes.kinds,
        option=np.repeat(np.arange(len(options)), [*map(len, columns)]),
        orders=nodes.orders[np.concatenate(columns)],
        pipelines=joined([line.take(some) for line, some in zip(lines, columns, strict=True)]),
    )


def _no_sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> str:
    gpus = gpus_of(kinds)
    batch, model = training.parallel.global_batch_size, training.model
    tensor = tensor_sizes(training, kinds)
    if not tensor:
        known = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
        groups = ", ".join(
            f"cluster.groups.{kind.name}: {kind.gpus} GPUs a node, profile {kind.gpu.profile} with tensor sizes "
            f"{', '.join(map(str, sorted(sizes or []))) or 'not measured'}"
            for kind, sizes in zip(kinds, known, strict=True)
        )
        return f"no tensor size suits all nodes and model.heads={model.heads}: {groups}"
    without = [one.parallel for one in sizes(training, kinds)]
    if without:
        return _not_as_given(without, gpus, choices)
    replicas = sorted({gpus // t // p for t in tensor for p in divisors(gpus // t) if p <= model.layers + 2})
    near = sorted(
        {n for d in replicas for n in (batch // d * d, (batch // d + 1) * d) if n}, key=lambda n: abs(n - batch)
    )
    nearest = ", ".join(map(str, near[:2]))
    return (
        f"parallel.global_batch_size={batch} is divisible by no number of replicas that {gpus} GPUs can have with at "
        f"most {model.layers + 2} stages: {', '.join(map(str, replicas))}; nearest that are: {nearest}"
    )


def _too_many_micro_batches(batch: int, gpus: int) -> str:
    return (
        f"parallel.global_batch_size={batch}: every plan for {gpus} GPUs has more than {MOST_MICRO_BATCHES} "
        "micro-batches for each replica, of which a search simulates each, or micro-batches that no GPU has room for; "
        f"use a smaller global batch, one with more divisors such as {_rounder(batch)}, or more nodes"
    )


def _rounder(batch: int) -> int:
    """The nearest number that is divisible by the largest power of 2 that is no more than its square root."""
    step = 1 << (batch.bit_length() // 2)
    return max(step, round(batch / step) * step)


def _not_as_given(possible: Sequence[Parallel], gpus: int, choices: Choices) -> str:
    given = " ".join(f"parallel.{key}={','.join(map(str, values))}" for key, values in choices.sizes.items())
    if any(map(choices.tries, possible)):
        return (
            f"no plan for {gpus} GPUs has parallel.schedule={','.join(choices.schedule)} {given}".rstrip()
            + ": interleaved needs two stages or more, a layer for each of their chunks, and with Megatron-LM a "
            "micro-batch for each stage; try another schedule, too"
        )
    values = {key: sorted({getattr(p, key) for p in possible}) for key in choices.sizes}
    known = "; ".join(f"{key} {', '.join(map(str, numbers))}" for key, numbers in values.items())
    together = ", not all of them together" if len(values) > 1 else ""
    return f"no plan for {gpus} GPUs has {given}; possible: {known}{together}"


def _nothing_fits(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> str:
    """Says how much memory, or how many nodes, it would take; each found by trying."""
    have = ", ".join(f"{kind.gpu.name} {kind.gpu.memory_gib:g} GiB" for kind in kinds)
    ways = []
    percents = range(110, 1001, 10)
    enough = bisect_left(percents, True, key=lambda percent: _fit(training, _larger(kinds, percent), choices))
    if enough < len(percents):
        ways.append(f"{percents[enough]} % of this memory on every GPU")
    for times in (2, 4, 8, 16):
        more = [replace(k, group=replace(k.group, count=k.group.count * times)) for k in kinds]
        if _fit(training, more, choices):
            ways.append(f"{times} times as many nodes, {gpus_of(more)} GPUs")
            break
    ways += [*_savers(choices), "a smaller model"]
    return (
        f"model={training.model.name} with parallel.global_batch_size={training.parallel.global_batch_size} fits into "
        f"the memory of cluster.gpus ({have}) with no plan; what would help: {'; or '.join(ways)}"
    )


def _larger(kinds: Sequence[NodeKind], percent: int) -> list[NodeKind]:
    return [replace(k, gpu=replace(k.gpu, memory_gib=k.gpu.memory_gib * percent / 100)) for k in kinds]


def _savers(choices: Choices) -> list[str]:
    """Options that save memory, and were not tried."""
    savers = []
    if Recompute.full not in choices.recompute:
        savers.append("parallel.recompute=full")
    if True not in choices.sharded_optimizer:
        savers.append("parallel.sharded_optimizer=true")
    return savers


def _fit(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> bool:
    return _fits(Space(training, kinds, choices))
