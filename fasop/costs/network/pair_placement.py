"""From which nodes to which others the stages of a plan send, where links differ by pairs of node groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fasop.costs.arrays import Integers
from fasop.costs.network.placement import Use, rings, stage_nodes, transfers


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
