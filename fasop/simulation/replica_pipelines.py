"""Replicas of a plan that lie on different kinds of nodes, each as a pipeline with its own GPUs.

A stage of `on_nodes` is as slow as its slowest GPU. That is exact where one replica has the slowest GPUs of all stages;
elsewhere the plan takes less.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers, distinct_rows
from fasop.costs.network.links import Link
from fasop.costs.network.placement import stage_nodes
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.training import Training
from fasop.simulation.linear import Linear
from fasop.simulation.nodes import Nodes, times_on
from fasop.simulation.on_nodes import by_parameters, on_nodes, pass_times
from fasop.simulation.pipelines import HeterogeneousReplicas, Pipelines


def by_replica(training: Training, nodes: Nodes) -> Pipelines:
    """Do as `on_nodes`, with the replicas of the plans that take less than the slowest GPU of each stage. Raises
    SearchError: a profile has no costs for the tensor size."""
    lines, parallel = on_nodes(training, nodes), training.parallel
    if len(nodes.kinds) == 1 or parallel.data == 1:
        return lines
    places = _places(nodes.gpus, parallel.tensor_size, parallel.data, parallel.pipeline, parallel.micro_batches_of)
    if not places:
        return lines
    times = nodes.gpu_times(training, [times_on(kind, training) for kind in nodes.kinds])
    every = [_Own.of(training, lines, times, nodes.orders, nodes.distinct_rows(one.nodes)) for one in places]
    slowest = np.zeros(len(lines), bool)
    slowest[every[0].order[every[0].slowest]] = True
    replicas = [own.replicas(lines, ~slowest, one.micro_batches) for own, one in zip(every, places, strict=True)]
    return replace(lines, replicas=tuple(one for one in replicas if len(one.of)))


class _Places(NamedTuple):
    """Where replicas lie that have as many micro-batches."""

    micro_batches: int
    nodes: Integers
    """[replicas, stages]: the node that each lies on in each stage, once for all that lie on the same ones."""


@lru_cache(maxsize=4096)
def _places(
    gpus_per_node: tuple[int, ...], tensor: int, data: int, pipeline: int, micro_batches: tuple[int, ...]
) -> list[_Places]:
    """Those with the most micro-batches first; none where each stage lies in one node."""
    ranks = np.array(stage_nodes(gpus_per_node, tensor, data, pipeline))
    if (ranks == ranks[:, :1]).all():
        return []
    nodes, counts = ranks[:, ::tensor].T, np.array(micro_batches)
    return [_Places(count, distinct_rows(nodes[counts == count])) for count in sorted({*micro_batches}, reverse=True)]


class _Own(NamedTuple):
    """What replicas on nodes in each order take, once for each kind of replica."""

    order: Integers
    """[replicas]: the number of the order."""
    passes: tuple[Linear, Linear]
    """[parts, replicas]: forward and backward."""
    optimizer: Linear
    slowest: NDArray[np.bool_]
    """[replicas]: whether each takes as long as the slowest GPU of every stage."""

    @classmethod
    def of(cls, training: Training, lines: Pipelines, times: Floats, orders: Integers, places: Integers) -> _Own:
        """`times` are `Nodes.gpu_times`, and `lines` are on nodes in these orders; for `places` see `_Places.nodes`."""
        kinds = orders[:, places].reshape(-1, places.shape[1])
        numbers = np.repeat(np.arange(len(orders)), len(places))
        rows = distinct_rows(np.column_stack([numbers, kinds]))
        order, own = rows[:, 0], times[:, rows[:, 1:].T]
        half = len(own) // 2 - 1
        passes = pass_times(training, own[:half]), pass_times(training, own[half:-2], own[-1])
        whole = [part.take(order) for part in (lines.forward, lines.backward)]
        optimizer = lines.optimizer.take(order)  # a sharded one waits for the slowest step, to hand out its results
        if not training.parallel.sharded_optimizer:
            whole.append(optimizer)
            link = Link(latency_s=np.zeros(own[-2].shape), s_per_byte=own[-2])
            optimizer = by_parameters(training, link, layer_numbers(training).stepped)
        slowest = np.ones(len(order), bool)
        for mine, most in zip((*passes, optimizer), whole, strict=False):
            for name in ("fixed", "layer"):
                slowest &= (getattr(mine, name) >= getattr(most, name)).reshape(-1, len(order)).all(axis=0)
        return cls(order=order, passes=passes, optimizer=optimizer, slowest=slowest)

    def replicas(self, lines: Pipelines, wanted: NDArray[np.bool_], micro_batches: int) -> HeterogeneousReplicas:
        """Those in the orders that are wanted."""
        some = np.nonzero(wanted[self.order])[0]
        forward, backward = (part.take(some) for part in self.passes)
        own = replace(
            lines.take(self.order[some]),
            forward=forward,
            backward=backward,
            optimizer=self.optimizer.take(some),
            micro_batches=micro_batches,
        )
        return HeterogeneousReplicas(lines=own, of=self.order[some])
