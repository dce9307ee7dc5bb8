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

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Flat lists of nodes; those of item i (a stage, a hop) begin at `starts[i]`. No item is without a node."""

    starts: Integers
    nodes: Integers
    between: Integers
    """1 where the link out of the node is used, 0 where GPUs within it talk."""
    sharing: Integers
    """By how many ranks at the same time."""


class Use(NamedTuple):
    node: int
    between: int
    sharing: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    stages: Uses
    """The nodes of each stage; `between` and `sharing` mean nothing."""
    hops: Uses
    """From each stage to the next one, and from the last to the first; the way back is the same."""
    sums: Uses
    """Gradients of each stage, over its replicas."""
    embedding: Uses
    """One item: between the first and the last stage."""


@lru_cache(maxsize=4096)
def place(gpus_per_node: tuple[int, ...], tensor: int, data: int, pipeline: int) -> Placement:
    """Of `tensor * data * pipeline` ranks, which must be as many as the nodes have GPUs."""
    node_of = [node for node, gpus in enumerate(gpus_per_node) for _ in range(gpus)]
    width = tensor * data
    assert len(node_of) == width * pipeline, f"{len(node_of)} GPUs for {width} * {pipeline} ranks"
    stage_nodes = [node_of[s * width : (s + 1) * width] for s in range(pipeline)]
    hops = [_transfers(zip(here, there, strict=True)) for here, there in pairwise([*stage_nodes, stage_nodes[0]])]
    ends = _transfers(zip(stage_nodes[0], stage_nodes[-1], strict=True), both_ways=True)
    return Placement(
        stages=_uses([[Use(node, 0, 1) for node in sorted(set(nodes))] for nodes in stage_nodes]),
        hops=_uses(hops),
        sums=_uses(_rings(stage_nodes, tensor)),
        embedding=_uses([ends]),
    )


def _transfers(pairs: Iterable[tuple[int, int]], *, both_ways: bool = False) -> list[Use]:
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


def _rings(stage_nodes: Sequence[Sequence[int]], tensor: int) -> list[list[Use]]:
    """By stage, the links of its rings of replicas, one ring for each tensor rank, over neighbouring ranks.

    A ring that several nodes hold leaves and enters each once; all rings run at the same time, of all stages.
    """
    leaving: Counter[int] = Counter()
    for nodes in stage_nodes:
        for ring in range(tensor):
            on = set(nodes[ring::tensor])
            leaving.update(on if len(on) > 1 else ())
    items = []
    for nodes in stage_nodes:
        uses = set()
        for ring in range(tensor):
            members = Counter(nodes[ring::tensor])
            uses |= {Use(node, 0, 1) for node, count in members.items() if count > 1 or len(members) == 1}
            uses |= {Use(node, 1, leaving[node]) for node in members if len(members) > 1}
        items.append(sorted(uses))
    return items


def _uses(items: Sequence[Sequence[Use]]) -> Uses:
    flat = np.array([use for item in items for use in item], np.int64)
    return Uses(
        starts=np.cumsum([0, *(len(item) for item in items[:-1])]),
        nodes=flat[:, 0],
        between=flat[:, 1],
        sharing=flat[:, 2],
    )
