"""Islands of a plan: each is a training by itself on nodes of its own, and all meet every so many iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from conf.schema.values.partition import Partition
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_table import LinkTable
from fasop.costs.network.links import Link
from fasop.costs.network.placement import around
from fasop.costs.parallelism import Numbers
from fasop.costs.profiles.steps import Operation
from fasop.costs.sizes import BYTES
from fasop.costs.training import PlacedTraining, Training
from fasop.simulation.iteration import Durations
from fasop.simulation.ranks.replicas import Replicas
from megatron_ext.contract.train_config import Precision


def by_island(plan: PlacedTraining) -> list[PlacedTraining]:
    """Returns each island of a plan as a plan of its own, in which replicas hand out the weights of the common step.

    A plan without islands is returned as it is. So is one whose islands are not each whole pipelines on nodes with
    equal numbers of GPUs by group; there the slowest link of all replicas counts.
    """
    parallel, islands = plan.training.parallel, plan.training.islands
    if parallel.own_plans:
        return _own_plans(plan)
    if not islands or not isinstance(parallel.tensor, int):
        return [plan]
    nodes = _nodes(plan.nodes, [size * parallel.pipeline * parallel.tensor for size in islands])
    if any(len({(node.name, node.gpus) for node in own}) > len({node.name for node in own}) for own in nodes):
        return [plan]
    meeting = _meeting(plan)
    ends = [0]
    for size in islands:
        ends.append(ends[-1] + size)
    return [
        replace(plan, training=_alone(plan.training, first, end, meeting), nodes=own)
        for (first, end), own in zip(pairwise(ends), nodes, strict=True)
    ]


def _own_plans(plan: PlacedTraining) -> list[PlacedTraining]:
    """The islands of a plan, each with its own. In common steps the replica with the most ranks stands for all, whose
    ranks send as much each; those of an island with fewer have more to send."""
    parallel = plan.training.parallel
    nodes = _nodes(plan.nodes, [own.world_size for own in parallel.own_plans])
    widths = [own.world_size // own.data for own in parallel.own_plans]
    meeting = _meeting(plan, max(widths))
    return [
        replace(
            plan,
            training=replace(
                plan.training,
                parallel=own,
                meeting=replace(meeting, s_per_byte=meeting.s_per_byte * width / max(widths)),
            ),
            partition=Partition(own.partition or Partition.even(plan.training.model.counted, own.pipeline).layers),
            nodes=own_nodes,
        )
        for own, own_nodes, width in zip(parallel.own_plans, nodes, widths, strict=True)
    ]


def durations_of(plan: PlacedTraining) -> Callable[[Sequence[int]], list[Durations]]:
    """Returns what takes the layers of each stage and gives what each replica of a plan takes with them; replicas that
    take the same share an object."""
    every = [Replicas(island) for island in by_island(plan)]
    return lambda layers: [one for replicas in every for one in replicas.with_streams(layers)]


def _nodes(nodes: Sequence[NodeKind], gpus: Sequence[int]) -> list[list[NodeKind]]:
    """Deal the nodes to islands of so many GPUs, in their order; two islands may have parts of a node."""
    dealt: list[list[NodeKind]] = []
    left = [*nodes][::-1]
    for wanted in gpus:
        own: list[NodeKind] = []
        while wanted:
            node = left.pop()
            taken = min(wanted, node.gpus)
            own.append(replace(node, gpus=taken))
            if taken < node.gpus:
                left.append(replace(node, gpus=node.gpus - taken))
            wanted -= taken
        dealt.append(own)
    return dealt


def _alone(training: Training, first: int, end: int, meeting: Link[float]) -> Training:
    """The replicas from `first` to `end` as a training of their own."""
    parallel = training.parallel
    counts = parallel.micro_batches_of[first:end]
    own = replace(
        parallel,
        data=end - first,
        islands=None,
        shares=counts if len({*counts}) > 1 else None,
        streams=None if parallel.streams is None else parallel.streams[first:end],
        global_batch_size=sum(counts) * parallel.micro_batch_size,
        node_order=None,
    )
    return replace(training, parallel=own, meeting=meeting)


def _meeting(plan: PlacedTraining, width: int | None = None) -> Link[float]:
    """Latency, and seconds for each byte of a rank's weights, until all islands have summed them; where islands
    differ, of a replica of `width` ranks.

    As many replicas of each island as the smallest has take a share each (`megatron_ext.engine.islands`); all ranks of
    a node that do so share its link, with all stages at once.
    """
    training, parallel = plan.training, plan.training.parallel
    shares, islands = min(training.islands), training.islands
    rings = _rings(plan, shares)
    hops = [hop for ring in rings for hop in around(ring)]
    leaving = Counter(here for here, there in hops if here != there)
    entering = Counter(there for here, there in hops if here != there)
    weights = training.model.parameters() / (width or parallel.pipeline * parallel.tensor_size)
    size = max(1.0, BYTES[Precision.fp32] * weights / shares / len(islands))
    kinds = plan.kinds
    exchange = Exchange(Operation.all_reduce, len(islands), size * len(islands), parallel.world_size)
    table = LinkTable.of(kinds, [kind.factors.gradients for kind in kinds], size, exchange)
    number = [[kind.name for kind in kinds].index(node.name) for node in plan.nodes]

    def hop(here: int, there: int) -> tuple[float, float]:
        a, b = number[here], number[there]
        if here == there:
            return float(table.inside.latency_s[a]), float(table.inside.s_per_byte[a])
        out, into = max(leaving[here], table.alone[a]), max(entering[there], table.alone[b])
        rate = max(table.leaving[a, b] * out, table.entering[a, b] * into)
        return float(table.latency_s[a, b]), float(rate)

    found = {one: hop(*one) for one in {*hops}}
    senders, receivers = np.array([[number[here], number[there]] for here, there in hops]).T[..., np.newaxis]
    shared = table.of_uplinks(senders, receivers, np.ones(len(hops), np.int64), np.zeros(1, np.int64)).max()
    slowest = Link(
        latency_s=max(latency for latency, _ in found.values()),
        s_per_byte=max(float(shared), *(rate for _, rate in found.values())),
    ).all_reduce(len(islands))
    return replace(slowest, s_per_byte=slowest.s_per_byte / shares)


def _rings(plan: PlacedTraining, shares: int) -> list[Numbers]:
    """List the nodes of the ranks that sum a share of some weights, one of each island."""
    parallel, islands = plan.training.parallel, plan.training.islands
    width = parallel.tensor_size
    node_of = [number for number, node in enumerate(plan.nodes) for _ in range(node.gpus)]
    if parallel.own_plans:
        parts = parallel.layout.parts
        every = [[(stage, tp) for stage, size in enumerate(part.tensors) for tp in range(size)] for part in parts]
        most = max(map(len, every))
        at = [
            [(part, own[number * len(own) // most]) for part, own in zip(parts, every, strict=True)]
            for number in range(most)
        ]
        return [
            tuple(node_of[part.rank(stage, part.start + replica, tp)] for part, (stage, tp) in one)
            for one in at
            for replica in range(shares)
        ]
    firsts = [sum(islands[:number]) * parallel.pipeline * width for number in range(len(islands))]
    return [
        tuple(
            node_of[first + (stage * size + replica) * width + tensor]
            for first, size in zip(firsts, islands, strict=True)
        )
        for stage in range(parallel.pipeline)
        for replica in range(shares)
        for tensor in range(width)
    ]
