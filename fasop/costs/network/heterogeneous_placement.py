"""Which links the stages of a plan use where they have unlike numbers of replicas, or tensor groups of unlike sizes.

Ranks lie stage by stage, in a stage replica by replica, and fill the nodes one after another. Replicas of neighbouring
stages exchange messages that have micro-batches in common; of tensor groups of t and u ranks, rank j of the receiving
one takes what rank j mod t of the sending one has.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.network.placement import PairPlacement, PairUse, PairUses, Use, Uses, around, pairs_of, rings
from megatron_ext.contract.layout import Layout

Pairs = list[tuple[int, int]]
"""Pairs of ranks of two stages, each by its number in its own."""


@dataclass(frozen=True, kw_only=True)
class HeterogeneousPlacement:
    """What `fasop.costs.network.placement.Placement` is, with links by pairs of nodes."""

    stages: Uses
    one_way_out: NDArray[np.bool_]
    pairs: PairPlacement


@lru_cache(maxsize=1024)
def place_heterogeneous(gpus_per_node: tuple[int, ...], layout: Layout) -> HeterogeneousPlacement:
    """Place as many ranks as the nodes have GPUs."""
    of_ranks = [node for node, gpus in enumerate(gpus_per_node) for _ in range(gpus)]
    assert len(of_ranks) == layout.world_size, f"{len(of_ranks)} GPUs for {layout.world_size} ranks"
    ends = [*(layout.rank(stage, 0, 0) for stage in range(layout.stages)), layout.world_size]
    nodes = [of_ranks[a:b] for a, b in pairwise(ends)]
    count = layout.stages
    hops = []
    for stage in range(count):
        other = (stage + 1) % count
        sizes = (layout.tensors[stage], layout.tensors[other]), (layout.replicas[stage], layout.replicas[other])
        hops.append(_hop(tuple(nodes[stage]), tuple(nodes[other]), Layout(*sizes)))
    sums = [[PairUse(of_stage[0], of_stage[0], 1, 1, 1)] for of_stage in nodes]
    spread = [stage for stage, of_stage in enumerate(nodes) if of_stage[0] != of_stage[-1]]
    tensors = [layout.tensors[stage] for stage in spread]
    for stage, tensor, uses in zip(spread, tensors, rings([nodes[one] for one in spread], tensors), strict=True):
        turning = (pair for ring in range(tensor) for pair in around(nodes[stage][ring::tensor]))
        sums[stage] = pairs_of(uses, turning)
    tied = _links(nodes[0], nodes[-1], _tied(layout), both_ways=True)
    return HeterogeneousPlacement(
        stages=Uses.of([[Use(node, 0, 1) for node in sorted(set(of_stage))] for of_stage in nodes]),
        one_way_out=np.array([count == 2 or bool(hops[stage].out & hops[stage - 1].back) for stage in range(count)]),
        pairs=PairPlacement(
            hops=PairUses.of([hop.uses for hop in hops]),
            sums=PairUses.of(sums, together=True),
            embedding=PairUses.of([tied]),
        ),
    )


class _Hop(NamedTuple):
    """What messages from a stage to the following one use."""

    uses: list[PairUse]
    out: set[int]
    """The nodes that they leave."""
    back: set[int]
    """The nodes that those on their way back leave."""


@lru_cache(maxsize=4096)
def _hop(here: tuple[int, ...], there: tuple[int, ...], both: Layout) -> _Hop:
    """From ranks on these nodes, of the first of `both` stages: plans that are searched have most of them in common."""
    pairs = exchanges(both, 0, 1)
    crossing = [(here[a], there[b]) for a, b in pairs if here[a] != there[b]]
    return _Hop(_links(here, there, pairs), {a for a, _ in crossing}, {b for _, b in crossing})


def exchanges(layout: Layout, stage: int, other: int) -> Pairs:
    """The ranks of a stage and of the following one that activations go between."""
    own, theirs = layout.tensors[stage], layout.tensors[other]
    return [
        (replica * own + place % own, peer * theirs + place)
        for replica in range(layout.replicas[stage])
        for peer in layout.met(stage, replica, other)
        for place in range(theirs)
    ]


def _tied(layout: Layout) -> Pairs:
    """The ranks of the first and the last stage that add up parts of the embedding's gradient."""
    first, last = layout.tensors[0], layout.tensors[-1]
    parts, rows = math.lcm(first, last), min(layout.replicas[0], layout.replicas[-1])
    return [
        (replica * first + part * first // parts, peer * last + part * last // parts)
        for replica in range(layout.replicas[0])
        for peer in range(replica % rows, layout.replicas[-1], rows)
        for part in range(parts)
    ]


def _links(here: Sequence[int], there: Sequence[int], pairs: Pairs, *, both_ways: bool = False) -> list[PairUse]:
    """The links that messages between these ranks use while all that send, or receive, out of their node do so at the
    same time.

    `both_ways`: each end of a pair sends to the other.
    """
    crossing = [*_flows(here, there, pairs)]
    sent = Counter(here[a] for a in {a for a, b in pairs if here[a] != there[b]})
    received = Counter(there[b] for b in {b for a, b in pairs if here[a] != there[b]})
    sharing = sent + received if both_ways else sent | received
    inside = [Use(node, 0, 1) for node in sorted({a for a, b in crossing if a == b})]
    back = [(b, a) for a, b in crossing] if both_ways else []
    return pairs_of([*inside, *(Use(node, 1, sharing[node]) for node in sorted(sharing))], [*crossing, *back])


def _flows(here: Sequence[int], there: Sequence[int], pairs: Pairs) -> Iterator[tuple[int, int]]:
    """Yields nodes between which ranks send, once for each rank that sends, or that receives if these are fewer."""
    peers = defaultdict[tuple[int, int], Pairs](list)
    for a, b in pairs:
        peers[here[a], there[b]].append((a, b))
    for nodes, ranks in peers.items():
        yield from [nodes] * min(len(set(side)) for side in zip(*ranks, strict=True))
