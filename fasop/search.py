"""The best plans for a cluster: degrees, micro-batch, node order and partition.

Bounds decide what need not be looked at: a plan is left out only if it is proved that none of its partitions beats the
plans that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from conf.partition import NodeOrder, Partition
from conf.schema import Parallel
from fasop.baselines import even, minmax
from fasop.bounds import bound, quick_bound
from fasop.candidates import Candidates, Space
from fasop.costs import Basis
from fasop.fast import Floats
from fasop.hardware import NodeKind
from fasop.partition import bottleneck, improved
from fasop.pipelines import Parts, Pipelines
from fasop.placement import Integers
from fasop.training import Training


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan, and what is predicted of it; times are seconds."""

    training: Training
    """Its `parallel` has partition and node order."""
    nodes: Sequence[NodeKind]
    """In their order."""
    total: float
    """An iteration, once the first one is over."""
    parts: Parts
    """Where the time goes; arrays of one."""
    bound: float
    """Proved: no partition of these sizes and nodes that fits takes less. That of the best plan is a tighter one."""
    basis: Basis
    pipelines: Pipelines
    """What its stages take; one pipeline."""

    @property
    def parallel(self) -> Parallel:
        return self.training.parallel

    @property
    def gap(self) -> float:
        """How much less than `total` another partition could take at most, as a part of it."""
        return 1 - self.bound / self.total


@dataclass(frozen=True, kw_only=True)
class Result:
    plans: Sequence[Plan]
    """The best first; equal ones in the order of their sizes and node orders."""
    candidates: int
    """Sizes and node orders that differ and fit into memory."""
    searched: int
    """Those of which partitions were searched; the bounds left out the others."""


def search(space: Space, most: int) -> Result:
    """The `most` best plans of the candidates of `space`."""
    groups = space.groups
    balanced = [bottleneck(group.pipelines, group.layers) for group in groups]
    bounds = [quick_bound(group.pipelines, group.layers, least) for group, least in zip(groups, balanced, strict=True)]
    plans: list[Plan] = []
    for number in sorted(range(len(groups)), key=lambda i: (bounds[i].min(), i)):
        limit = plans[most - 1].total if len(plans) >= most else np.inf
        worth = np.nonzero(bounds[number] <= limit)[0]
        if len(worth):
            chosen = groups[number].take(worth)
            begin = start(chosen.pipelines, chosen.layers, balanced[number][:, worth])
            partitions, _ = improved(chosen.pipelines, begin)
            plans += _plans(chosen, space.kinds, partitions, bounds[number][worth])
            plans.sort(key=lambda plan: (plan.total, _sizes(plan.parallel)))
    best = plans[0]
    proved = bound(best.pipelines, groups[0].layers)[0]
    plans[0] = replace(best, bound=max(best.bound, float(proved)))
    return Result(plans=plans[:most], candidates=sum(len(group.orders) for group in groups), searched=len(plans))


def start(pipelines: Pipelines, layers: int, balanced: Integers) -> Integers:
    """Where the search for partitions begins: the best of what others do, if it fits, and the smallest largest stage.

    So the partition that is found is never worse than theirs.
    """
    best, seconds = balanced.copy(), pipelines.iteration(balanced)
    for other in (minmax(pipelines, layers), even(pipelines, layers)):
        taken = np.where(pipelines.fits(other), pipelines.iteration(other), np.inf)
        better = taken < seconds
        best[:, better], seconds[better] = other[:, better], taken[better]
    return best


def _plans(group: Candidates, kinds: Sequence[NodeKind], partitions: Integers, proved: Floats) -> list[Plan]:
    parts = group.pipelines.parts(partitions)
    plans = []
    for column, order in enumerate(group.orders):
        nodes = [kinds[kind] for kind in order]
        parallel = replace(
            group.training.parallel,
            partition=str(Partition(tuple(partitions[:, column].tolist()))),
            node_order=str(NodeOrder(tuple(kind.name for kind in nodes))),
        )
        plans.append(
            Plan(
                training=replace(group.training, parallel=parallel),
                nodes=nodes,
                total=float(parts.total[column]),
                parts=parts.of(column),
                bound=float(proved[column]),
                basis=Basis(int(group.pipelines.basis[column])),
                pipelines=group.pipelines.take(np.array([column])),
            )
        )
    return plans


def _sizes(parallel: Parallel) -> tuple[int, int, int, int, str]:
    order = parallel.node_order or ""
    return parallel.tensor, parallel.data, parallel.pipeline, parallel.micro_batch_size, order
