"""Everything that a search looks at: sizes and node orders that are possible and fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fasop.costs import measured_tensor_sizes
from fasop.errors import SearchError
from fasop.hardware import NodeKind
from fasop.orders import orders
from fasop.partition import feasible
from fasop.pipelines import Pipelines, pipelines
from fasop.placement import Integers
from fasop.training import Training


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Of the same sizes, on nodes with the same numbers of GPUs: one for each node order that makes a difference."""

    training: Training
    orders: Integers
    """[candidates, nodes]: the kind of each node."""
    pipelines: Pipelines

    @property
    def layers(self) -> int:
        return self.training.model.layers

    def take(self, columns: Integers) -> Candidates:
        return replace(self, orders=self.orders[columns], pipelines=self.pipelines.take(columns))


@dataclass(frozen=True, kw_only=True)
class Space:
    kinds: Sequence[NodeKind]
    groups: Sequence[Candidates]
    """All that fit into memory with some partition."""
    too_large: int
    """How many do not fit with any."""


def space(training: Training, kinds: Sequence[NodeKind]) -> Space:
    """The candidates for all nodes of these kinds.

    `training` gives the model, the global batch, the schedule and what else is not searched.

    Raises:
        SearchError: no sizes are possible, or nothing fits into memory, with what would help.
    """
    chosen = list(sizes(training, kinds))
    if not chosen:
        raise SearchError(_no_sizes(training, kinds))
    built = _built(chosen, kinds)
    groups = [group for group in map(_fitting, built) if len(group.orders)]
    if not groups:
        raise SearchError(_nothing_fits(training, kinds))
    every = sum(len(group.orders) for group in built)
    return Space(kinds=kinds, groups=groups, too_large=every - sum(len(group.orders) for group in groups))


def sizes(training: Training, kinds: Sequence[NodeKind]) -> Iterator[Training]:
    """Every division of all GPUs and of the batch, in increasing order of tensor, data and micro-batch size.

    A tensor group lies inside a node, and was measured where the model was. A pipeline has no more stages than layers
    and one each for embedding and head.
    """
    model, parallel = training.model, training.parallel
    gpus = sum(kind.gpus * kind.group.count for kind in kinds)
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
                yield replace(training, parallel=sized)


def tensor_sizes(training: Training, kinds: Sequence[NodeKind]) -> list[int]:
    """Those that fit the model and the nodes, and that every profile of the model has."""
    model = training.model
    measured = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
    return [
        tensor
        for tensor in divisors(min(kind.gpus for kind in kinds))
        if model.heads % tensor == 0
        and not (training.parallel.sequence_parallel and model.sequence_length % tensor)
        and all(kind.gpus % tensor == 0 for kind in kinds)
        and all(known is None or tensor in known for known in measured)
    ]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _built(chosen: Sequence[Training], kinds: Sequence[NodeKind]) -> list[Candidates]:
    shapes = _by_shape(orders([kind.group.count for kind in kinds]), kinds)
    return [
        _distinct(Candidates(training=one, orders=shaped, pipelines=pipelines(one, kinds, shaped)))
        for one in chosen
        for shaped in shapes
    ]


def _by_shape(every: Integers, kinds: Sequence[NodeKind]) -> list[Integers]:
    """The orders, sorted by the numbers of GPUs of the nodes in each place."""
    shapes = np.array([kind.gpus for kind in kinds])[every]
    _, number = np.unique(shapes, axis=0, return_inverse=True)
    return [every[number.reshape(-1) == i] for i in range(number.max() + 1)]


def _distinct(group: Candidates) -> Candidates:
    """Without those whose stages and links are all as in an earlier one: nodes of a stage may change places."""
    lines = group.pipelines
    if len(lines) == 1:
        return group
    parts = [lines.forward, lines.backward, lines.sums, lines.optimizer]
    rows = [*(part.fixed for part in parts), *(part.layer for part in parts), lines.hop, lines.capacity]
    numbers = np.concatenate([*rows, lines.embedding[np.newaxis], lines.basis[np.newaxis]])
    _, first = np.unique(numbers, axis=1, return_index=True)
    return group if len(first) == len(lines) else group.take(np.sort(first))


def _fitting(group: Candidates) -> Candidates:
    fits = feasible(group.pipelines, group.layers)
    return group if fits.all() else group.take(np.nonzero(fits)[0])


def _no_sizes(training: Training, kinds: Sequence[NodeKind]) -> str:
    gpus = sum(kind.gpus * kind.group.count for kind in kinds)
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
    replicas = sorted({gpus // t // p for t in tensor for p in divisors(gpus // t) if p <= model.layers + 2})
    near = sorted(
        {n for d in replicas for n in (batch // d * d, (batch // d + 1) * d) if n}, key=lambda n: abs(n - batch)
    )
    nearest = ", ".join(map(str, near[:2]))
    return (
        f"parallel.global_batch_size={batch} is divisible by no number of replicas that {gpus} GPUs can have with at "
        f"most {model.layers + 2} stages: {', '.join(map(str, replicas))}; nearest that are: {nearest}"
    )


def _nothing_fits(training: Training, kinds: Sequence[NodeKind]) -> str:
    """Says how much memory, or how many nodes, it would take; each found by trying."""
    have = ", ".join(f"{kind.gpu.name} {kind.gpu.memory_gib:g} GiB" for kind in kinds)
    ways = []
    for percent in range(110, 1001, 10):
        larger = [replace(k, gpu=replace(k.gpu, memory_gib=k.gpu.memory_gib * percent / 100)) for k in kinds]
        if _fit(training, larger):
            ways.append(f"{percent} % of this memory on every GPU")
            break
    for times in (2, 4, 8, 16):
        more = [replace(k, group=replace(k.group, count=k.group.count * times)) for k in kinds]
        if _fit(training, more):
            ways.append(f"{times} times as many nodes, {sum(k.gpus * k.group.count for k in more)} GPUs")
            break
    ways.append("parallel.recompute=full, parallel.sharded_optimizer=true or a smaller model")
    return (
        f"model={training.model.name} with parallel.global_batch_size={training.parallel.global_batch_size} fits into "
        f"the memory of cluster.gpus ({have}) with no plan; what would help: {'; or '.join(ways)}"
    )


def _fit(training: Training, kinds: Sequence[NodeKind]) -> bool:
    return any(len(_fitting(group).orders) for group in _built(list(sizes(training, kinds)), kinds))
