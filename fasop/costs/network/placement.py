"""Which nodes the stages of a plan lie on, and how many ranks share a node's link when a stage sends.

Ranks lie in Megatron's order, tensor fastest, then data, then pipeline, and fill the nodes one after another. What
depends on the node's kind is left open, so that one placement serves all orders of nodes with the same numbers of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Integers


class Use(NamedTuple):
    """How a node's links are used."""

    node: int
    between: int
    """1 where the link out of the node is used, 0 where GPUs within it talk."""
    sharing: int
    """How many ranks use it at the same time."""


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Flat lists of `Use`, by its fields; those of item i (a stage, a hop) begin at `starts[i]`, none is empty."""

    starts: Integers
    nodes: Integers
    between: Integers
    sharing: Integers

    @classmethod
    def of(cls, items: Sequence[Sequence[Use]]) -> Uses:
        nodes, between, sharing = np.array([use for item in items for use in item], np.int64).T
        starts = np.cumsum([0, *(len(item) for item in items[:-1])])
        return cls(starts=starts, nodes=nodes, between=between, sharing=sharing)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Nodes by number, and links by what is sent over them at the same time."""

    stages: Uses
    """The nodes of each stage, sorted; `between` and `sharing` mean nothing."""
    hops: Uses
    """From each stage to the next one, and from the last to the first; the way back is the same."""
    one_way_out: NDArray[np.bool_]
    """[stages]: whether messages to both neighbours leave one node, or go to the only other stage."""
    sums: Uses
    """Gradients of each stage, over its replicas."""
    spread: Integers
    """[stages, 2]: on how many nodes a stage's replicas lie, and how many on each; 1 and 1 where nodes have unlike
    numbers of them, or one each."""
    embedding: Uses
    """One item: between the first and the last stage."""


@lru_cache(maxsize=4096)
def place(gpus_per_node: tuple[int, ...], tensor: int, data: int, pipeline: int) -> Placement:
    """Place `tensor * data * pipeline` ranks, which must be as many as the nodes have GPUs."""
    nodes = stage_nodes(gpus_per_node, tensor, data, pipeline)
    hops = [transfers(zip(here, there, strict=True)) for here, there in pairwise([*nodes, nodes[0]])]
    return Placement(
        stages=Uses.of([[Use(node, 0, 1) for node in sorted(set(of_stage))] for of_stage in nodes]),
        hops=Uses.of(hops),
        one_way_out=np.array([pipeline == 2 or _one_way_out(nodes, stage) for stage in range(pipeline)]),
        sums=Uses.of(rings(nodes, [tensor] * pipeline)),
        spread=np.array([_spread(of_stage, tensor) for of_stage in nodes]),
        embedding=Uses.of([transfers(zip(nodes[0], nodes[-1], strict=True), both_ways=True)]),
    )


def stage_nodes(gpus_per_node: Sequence[int], tensor: int, data: int, pipeline: int) -> list[list[int]]:
    """List the node of each rank, by stage."""
    node_of = [node for node, gpus in enumerate(gpus_per_node) for _ in range(gpus)]
    width = tensor * data
    assert len(node_of) == width * pipeline, f"{len(node_of)} GPUs for {width} * {pipeline} ranks"
    return [node_of[s * width : (s + 1) * width] for s in range(pipeline)]


def _spread(nodes: Sequence[int], tensor: int) -> tuple[int, int]:
    """Returns `Placement.spread` of a stage."""
    rings = [Counter(nodes[ring::tensor]) for ring in range(tensor)]
    alike = {(len(ring), count) for ring in rings for count in ring.values()}
    on, each = alike.pop() if len(alike) == 1 else (1, 1)
    return (on, each) if on > 1 and each > 1 else (1, 1)


def _one_way_out(stage_nodes: Sequence[Sequence[int]], stage: int) -> bool:
    """Whether ranks of one node send to the stage's both neighbours out of it."""
    here, following = stage_nodes[stage], stage_nodes[(stage + 1) % len(stage_nodes)]
    ahead, back = (
        {node for node, other in zip(here, there, strict=True) if node != other}
        for there in (following, stage_nodes[stage - 1])
    )
    return bool(ahead & back)


def transfers(pairs: Iterable[tuple[int, int]], *, both_ways: bool = False) -> list[Use]:
    """Links that messages between nodes use, all sent at the same time. Links are full duplex: out and in are apart.

    `both_ways`: each end of a pair sends to the other.
    """
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    within = set()
    for here, there in pairs:
        if here == there:
            within.add(here)
            continue
        for a, b in ((here, there), (there, here))[: 1 + both_ways]:
            sent[a] += 1
            received[b] += 1
    outside = [Use(node, 1, max(sent[node], received[node])) for node in sorted(sent.keys() | received.keys())]
    return [*(Use(node, 0, 1) for node in sorted(within)), *outside]


def rings(stage_nodes: Sequence[Sequence[int]], tensors: Sequence[int]) -> list[list[Use]]:
    """List the links of each stage's rings of replicas, one ring for each tensor rank, over neighbouring ranks.

    A ring that several nodes hold leaves and enters each once; all rings run at the same time, of all stages.
    """
    leaving: Counter[int] = Counter()
    for nodes, tensor in zip(stage_nodes, tensors, strict=True):
        for ring in range(tensor):
            on = set(nodes[ring::tensor])
            leaving.update(on if len(on) > 1 else ())
    items = []
    for nodes, tensor in zip(stage_nodes, tensors, strict=True):
        uses = set()
        for ring in range(tensor):
            members = Counter(nodes[ring::tensor])
            uses |= {Use(node, 0, 1) for node, count in members.items() if count > 1 or len(members) == 1}
            uses |= {Use(node, 1, leaving[node]) for node in members if len(members) > 1}
        items.append(sorted(uses))
    return items
