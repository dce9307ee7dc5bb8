"""Which nodes the stages of a plan lie on, how many ranks share a node's link when a stage sends, and where to.

Ranks lie in Megatron's order, tensor fastest, then data, then pipeline, and fill the nodes one after another. What
depends on the node's kind is left open, so that one placement serves all orders of nodes with the same numbers of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Integers


class PairUse(NamedTuple):
    """How the link from one node to another is used; where both are the same node, how the links in it are."""

    source: int
    target: int
    leaving: int
    """Ranks that use the source's link out of the node at the same time."""
    entering: int
    """Ranks that use the target's."""
    flows: int
    """Ranks that send from the source to the target."""


@dataclass(frozen=True, kw_only=True)
class PairUses:
    """Flat lists of `PairUse`, by its fields; those of item i begin at `starts[i]`, none is empty."""

    starts: Integers
    sources: Integers
    targets: Integers
    leaving: Integers
    entering: Integers
    flows: Integers
    together: bool = False
    """Whether all items happen at the same time."""

    @classmethod
    def of(cls, items: Sequence[Sequence[PairUse]], *, together: bool = False) -> PairUses:
        sources, targets, leaving, entering, flows = np.array([use for item in items for use in item], np.int64).T
        starts = np.cumsum([0, *(len(item) for item in items[:-1])])
        return cls(
            starts=starts,
            sources=sources,
            targets=targets,
            leaving=leaving,
            entering=entering,
            flows=flows,
            together=together,
        )

    @property
    def back(self) -> PairUses:
        """The other way round."""
        return replace(self, sources=self.targets, targets=self.sources, leaving=self.entering, entering=self.leaving)


@dataclass(frozen=True, kw_only=True)
class PairPlacement:
    """The items of `Placement`, by pairs of nodes."""

    hops: PairUses
    """From each stage to the next one, and from the last to the first."""
    sums: PairUses
    """From each replica to the next one of its ring."""
    embedding: PairUses


@lru_cache(maxsize=4096)
def place_pairs(gpus_per_node: tuple[int, ...], tensor: int, data: int, pipeline: int) -> PairPlacement:
    """Do as `fasop.costs.network.placement.place`, for pairs of nodes."""
    nodes = stage_nodes(gpus_per_node, tensor, data, pipeline)
    hops = [*pairwise([*nodes, nodes[0]])]
    ends = nodes[0], nodes[-1]
    turning = [[pair for ring in range(tensor) for pair in around(of_stage[ring::tensor])] for of_stage in nodes]
    return PairPlacement(
        hops=PairUses.of([pairs_of(transfers(*hop), zip(*hop, strict=True)) for hop in hops]),
        sums=PairUses.of(
            [pairs_of(uses, ring) for uses, ring in zip(rings(nodes, [tensor] * pipeline), turning, strict=True)],
            together=True,
        ),
        embedding=PairUses.of(
            [pairs_of(transfers(*ends, both_ways=True), [*zip(*ends, strict=True), *zip(*ends[::-1], strict=True)])]
        ),
    )


def around(ring: Sequence[int]) -> list[tuple[int, int]]:
    return [*pairwise([*ring, ring[0]])]


def pairs_of(uses: Sequence[Use], crossing: Iterable[tuple[int, int]]) -> list[PairUse]:
    """`uses` say what is shared, by node, and in which nodes messages stay; `crossing` are the nodes between which each
    rank sends."""
    sharing = {use.node: use.sharing for use in uses if use.between}
    flows = Counter((a, b) for a, b in crossing if a != b)
    between = [PairUse(a, b, sharing[a], sharing[b], count) for (a, b), count in flows.items()]
    return [*(PairUse(use.node, use.node, 1, 1, 1) for use in uses if not use.between), *sorted(between)]


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

    @property
    def counts(self) -> Integers:
        """[items]"""
        return np.append(self.starts[1:], len(self.nodes)) - self.starts

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
    hops = [transfers(here, there) for here, there in pairwise([*nodes, nodes[0]])]
    return Placement(
        stages=Uses.of([[Use(node, 0, 1) for node in sorted(set(of_stage))] for of_stage in nodes]),
        hops=Uses.of(hops),
        one_way_out=np.array([pipeline == 2 or _one_way_out(nodes, stage) for stage in range(pipeline)]),
        sums=Uses.of(rings(nodes, [tensor] * pipeline)),
        spread=np.array([_spread(of_stage, tensor) for of_stage in nodes]),
        embedding=Uses.of([transfers(nodes[0], nodes[-1], both_ways=True)]),
    )


def stage_nodes(gpus_per_node: Sequence[int], tensor: int, data: int, pipeline: int) -> list[list[int]]:
    """List the node of each rank, by stage."""
    node_of = [node for node, gpus in enumerate(gpus_per_node) for _ in range(gpus)]
    width = tensor * data
    assert len(node_of) == width * pipeline, f"{len(node_of)} GPUs for {width} * {pipeline} ranks"
    return [node_of[s * width : (s + 1) * width] for s in range(pipeline)]


def _spread(nodes: Sequence[int], tensor: int) -> tuple[int, int]:
    """Returns `Placement.spread` of a stage."""
    alike = {(len(ring), count) for ring in map(Counter, _distinct_rings(nodes, tensor)) for count in ring.values()}
    on, each = alike.pop() if len(alike) == 1 else (1, 1)
    return (on, each) if on > 1 and each > 1 else (1, 1)


def _distinct_rings(nodes: Sequence[int], tensor: int) -> Counter[tuple[int, ...]]:
    """Count the rings of a stage that lie on the same nodes."""
    return Counter(tuple(nodes[ring::tensor]) for ring in range(tensor))


def _one_way_out(stage_nodes: Sequence[Sequence[int]], stage: int) -> bool:
    """Whether ranks of one node send to the stage's both neighbours out of it."""
    here, following = stage_nodes[stage], stage_nodes[(stage + 1) % len(stage_nodes)]
    ahead = {node for node, other in zip(here, following, strict=True) if node != other}
    back = {node for node, other in zip(here, stage_nodes[stage - 1], strict=True) if node != other}
    return not ahead.isdisjoint(back)


def transfers(here: Sequence[int], there: Sequence[int], *, both_ways: bool = False) -> list[Use]:
    """Links that messages between nodes use, from each of `here` to that in the same place `there`, all sent at the
    same time. Links are full duplex: out and in are apart.

    `both_ways`: each end of a pair sends to the other.
    """
    pairs = [*zip(here, there, strict=True)]
    sent, received = (Counter(pair[end] for pair in pairs if pair[0] != pair[1]) for end in (0, 1))
    sharing = sent + received if both_ways else sent | received
    return [
        *(Use(node, 0, 1) for node in sorted({source for source, target in pairs if source == target})),
        *(Use(node, 1, sharing[node]) for node in sorted(sharing)),
    ]


def rings(stage_nodes: Sequence[Sequence[int]], tensors: Sequence[int]) -> list[list[Use]]:
    """List the links of each stage's rings of replicas, one ring for each tensor rank, over neighbouring ranks.

    A ring that several nodes hold leaves and enters each once; all rings run at the same time, of all stages.
    """
    every = [_distinct_rings(nodes, tensor) for nodes, tensor in zip(stage_nodes, tensors, strict=True)]
    leaving: Counter[int] = Counter()
    for of_stage in every:
        for ring, times in of_stage.items():
            on = set(ring)
            for node in on if len(on) > 1 else ():
                leaving[node] += times
    items = []
    for of_stage in every:
        uses = set()
        for members in map(Counter, of_stage):
            uses |= {Use(node, 0, 1) for node, count in members.items() if count > 1 or len(members) == 1}
            uses |= {Use(node, 1, leaving[node]) for node in members if len(members) > 1}
        items.append(sorted(uses))
    return items
