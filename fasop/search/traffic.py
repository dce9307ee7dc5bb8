"""What the bytes of an iteration cost that go between groups of nodes, such as zones, where these have a price."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from fasop.costs import sizes
from fasop.costs.hardware import NodeKind, has_prices
from fasop.costs.network.heterogeneous_placement import exchanges
from fasop.costs.network.links import Link
from fasop.costs.network.placement import around
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.training import PlacedTraining, Training
from fasop.simulation.islands import by_island
from fasop.simulation.on_nodes import by_parameters
from fasop.simulation.ranks.heterogeneous_stages import alone, cuts_scattered
from megatron_ext.contract.train_config import Precision

GB = 1e9


def dollars_per_step(plan: PlacedTraining) -> float:
    """US dollars for what an iteration sends from nodes of one group to another at `price_per_gb`: activations and
    their gradients, rings of gradients and weights, and the embedding's gradients. Sums within nodes first count as
    the ring of all replicas, an upper bound.
    """
    if not has_prices(plan.nodes):
        return 0.0
    if len(islands := by_island(plan)) > 1:
        return sum(map(_dollars, islands)) + _of_common_step(islands) / plan.training.sync_every
    return _dollars(plan)


def _of_common_step(islands: Sequence[PlacedTraining]) -> float:
    """Dollars for a ring of islands that sums all weights, in fp32, over the dearest link from each one to the next."""
    size = 2 * (len(islands) - 1) / len(islands) * bytes_of_weights(islands)
    hops = zip(islands, [*islands[1:], islands[0]], strict=True)
    dearest = [max(_price(a, b) for a in one.nodes for b in other.nodes) for one, other in hops]
    return size / GB * sum(dearest)


def bytes_of_weights(islands: Sequence[PlacedTraining]) -> float:
    """Count what islands average, in fp32: the weights of all stages, with words that two stages have for both."""
    found = []
    for plan in islands:
        parallel, layers = plan.training.parallel, plan.partition.layers
        tensors = enumerate(parallel.layout.tensors)
        stages = [(stage, size, alone(plan.training, size, 1, parallel.of_stage(stage))) for stage, size in tensors]
        found.append(sum(size * _parameters(one, layers, stage) for stage, size, one in stages))
    return max(found) * sizes.BYTES[Precision.fp32]


def _price(one: NodeKind, other: NodeKind) -> float:
    """Return what a node pays for a GB to another one, which may be of its own group."""
    return one.links[other.name].price_per_gb or 0.0 if other.name in one.links else 0.0


def _dollars(plan: PlacedTraining) -> float:
    """`dollars_per_step` of replicas that all sum in every iteration."""
    prices = [[_price(one, other) * (a != b) for b, other in enumerate(plan.nodes)] for a, one in enumerate(plan.nodes)]
    if not any(map(any, prices)):
        return 0.0
    node = [number for number, kind in enumerate(plan.nodes) for _ in range(kind.gpus)]
    return sum(size / GB * prices[node[a]][node[b]] for (a, b), size in bytes_between_ranks(plan).items())


def bytes_between_ranks(plan: PlacedTraining) -> Counter[tuple[int, int]]:
    """Bytes that a rank sends to another in an iteration."""
    found: Counter[tuple[int, int]] = Counter()
    for part in (_messages(plan), _rings(plan), _tied(plan.training)):
        for sender, receiver, size in part:
            found[sender, receiver] += size  # type: ignore[assignment]  # bytes of a ring need not be whole
    return found


Sent = Iterator[tuple[int, int, float]]
"""Sender, receiver and bytes."""


def _messages(plan: PlacedTraining) -> Sent:
    training, parallel = plan.training, plan.training.parallel
    layout, stages = parallel.layout, parallel.pipeline
    behind = np.cumsum(plan.partition.layers)[:-1].tolist()
    scattered = cuts_scattered(plan)
    count = parallel.global_batch_size // parallel.micro_batch_size
    for cut, layers in enumerate(behind):
        stage, other = cut % stages, (cut + 1) % stages
        own, theirs = layout.tensors[stage], layout.tensors[other]
        part = own if stage in scattered else 1
        size = alone(training, own, layout.replicas[stage], parallel.of_stage(stage)).messages[layers] / part
        for a, b in exchanges(layout, stage, other):
            replica, peer = a // own, b // theirs
            every = math.lcm(layout.replicas[stage], layout.replicas[other])
            batches = float(parallel.micro_batches_of[replica]) if layout.even else count / every
            sender, receiver = layout.rank(stage, replica, a % own), layout.rank(other, peer, b % theirs)
            yield sender, receiver, batches * size
            yield receiver, sender, batches * size


def _rings(plan: PlacedTraining) -> Sent:
    """Each replica sends the next one as much in a ring."""
    layout, layers = plan.training.parallel.layout, plan.partition.layers
    for stage, (tensor, replicas) in enumerate(zip(layout.tensors, layout.replicas, strict=True)):
        if replicas == 1:
            continue
        one = alone(plan.training, tensor, replicas, plan.training.parallel.of_stage(stage))
        numbers = _parameters(one, layers, stage)
        size = (replicas - 1) / replicas * numbers * _bytes_of_parameter(one)
        for place in range(tensor):
            for a, b in around([layout.rank(stage, replica, place) for replica in range(replicas)]):
                yield a, b, size


def _bytes_of_parameter(one: Training) -> float:
    """What travels of a parameter, all of it: twice in an all-reduce, once in its halves."""
    if not one.parallel.sharded_optimizer:
        return 2.0 * one.reduced_bytes
    rounds = one.parallel.micro_batches if one.scatters else 1
    return rounds * one.reduced_bytes + (2 * rounds if one.gathers else 1) * one.width


def _parameters(one: Training, layers: Sequence[int], stage: int) -> float:
    """Count the parameters that a rank of a stage sums."""
    counts, stages = one.blocks.counts, one.parallel.pipeline
    ends = [0, *np.cumsum(layers).tolist()]
    own = [counts[:, b] - counts[:, a] for number, (a, b) in enumerate(pairwise(ends)) if number % stages == stage]
    fixed = by_parameters(one, Link(latency_s=np.zeros(1), s_per_byte=np.ones(1)), [0.0] * len(counts)).fixed[stage]
    return float(fixed[0]) + float(np.dot(layer_numbers(one).summed, sum(own)))


def _tied(training: Training) -> Sent:
    """The first and the last stage all-reduce the embedding's gradients, where both have one."""
    layout = training.parallel.layout
    tensor, last = min(layout.tensors[0], layout.tensors[-1]), layout.stages - 1
    shared, holders = sizes.shared_parameters(training.model, tensor)
    if last == 0 or holders < 2 or not shared:
        return
    for replica in range(min(layout.replicas[0], layout.replicas[-1])):
        for place in range(tensor):
            first, end = layout.rank(0, replica, place), layout.rank(last, replica, place)
            yield first, end, float(training.gradient_bytes * shared)
            yield end, first, float(training.gradient_bytes * shared)
