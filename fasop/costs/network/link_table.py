"""Links by pairs of node kinds: `cluster.links`, and the groups' own figures where it says nothing.

All ranks of a node share its link to other nodes: `s_per_byte` counts as often as the sender has ranks that send out
of the node at the same time, or the receiver such that receive, whichever are more. Likewise all ranks below a leaf
switch (`cluster.topology`) share its uplink to nodes elsewhere. With several network cards it counts at least as often
as there are cards for each that the rank, or its ring, can use. Of several links that must all be
passed at the same time, as those of a ring of replicas, whose steps wait for each other, the slowest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.links import Link, transfer_s
from fasop.costs.network.placement import PairUses


def has_pairs(kinds: Sequence[NodeKind]) -> bool:
    """Whether any link is not as the groups' own figures say."""
    return may_be_quicker(kinds) or any(kind.uplink is not None or kind.group.nics > 1 for kind in kinds)


def may_be_quicker(kinds: Sequence[NodeKind]) -> bool:
    """Whether any link may be quicker than the groups' own figures say."""
    of_pairs = any(other.name in kind.links for kind in kinds for other in kinds)
    return of_pairs or any(kind.collectives is not None for kind in kinds)


def by_size(kinds: Sequence[NodeKind]) -> bool:
    """Whether any link depends on the message's size: a pair's bandwidth, or measured collectives."""
    of_pairs = any(link.gbit_per_s_by_bytes for kind in kinds for link in kind.links.values())
    return of_pairs or any(kind.collectives is not None for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class LinkTable:
    """What messages of one size take from a node of each kind to one of each kind, [kinds, kinds]."""

    inside: Link[Floats]
    """[kinds]: between GPUs of a node."""
    latency_s: Floats
    leaving: Floats
    """Seconds per byte of one rank of the sender; of a pair without an entry by the sender's own figures."""
    entering: Floats
    """Likewise of the receiver."""
    alone: Floats
    """[kinds]: `NodeKind.alone`."""
    leaf: Integers
    """[kinds]: the number of the leaf on which nodes hang; -1 of none."""
    uplinks: Floats
    """[kinds]: seconds per byte of one rank that leaves the leaf, or comes to it."""

    @classmethod
    def of(cls, kinds: Sequence[NodeKind], factors: Sequence[float], size: float, exchange: Exchange) -> LinkTable:
        """For messages of `size` bytes, in what ranks exchange. `factors`, by kind, are what times are multiplied with;
        a pair has the larger one of its own."""
        own, by = [kind.between(exchange) for kind in kinds], np.array(factors)
        latency = np.array([link.latency_s for link in own]) * by
        rate = np.array([link.s_per_byte for link in own]) * by
        shape, most = (len(kinds), len(kinds)), np.maximum.outer(by, by)
        latencies = np.maximum.outer(latency, latency)
        leaving, entering = np.broadcast_to(rate[:, np.newaxis], shape).copy(), np.broadcast_to(rate, shape).copy()
        for row, kind in enumerate(kinds):
            for column, other in enumerate(kinds):
                if (link := kind.links.get(other.name)) is None:
                    continue
                if link.latency_us is not None:
                    latencies[row, column] = most[row, column] * link.latency_us * 1e-6
                if (seconds := transfer_s(link, size)) is not None:
                    leaving[row, column] = entering[row, column] = most[row, column] * seconds / size
        inside = [kind.within(exchange) for kind in kinds]
        leaves = [*dict.fromkeys(kind.uplink.leaf for kind in kinds if kind.uplink is not None)]
        return cls(
            leaf=np.array([-1 if kind.uplink is None else leaves.index(kind.uplink.leaf) for kind in kinds]),
            uplinks=by * [0.0 if kind.uplink is None else 8e-9 / kind.uplink.gbit_per_s for kind in kinds],
            alone=np.array([kind.alone(exchange) for kind in kinds]),
            inside=Link(
                latency_s=np.array([link.latency_s for link in inside]) * by,
                s_per_byte=np.array([link.s_per_byte for link in inside]) * by,
            ),
            latency_s=latencies,
            leaving=leaving,
            entering=entering,
        )

    def least(self) -> LinkTable:
        """Where nodes of each kind have among themselves what they have with any kind at best, there or back: no link
        of one with another node is quicker."""
        latency = np.diag(np.minimum(self.latency_s, self.latency_s.T).min(axis=1))
        rate = np.diag(np.minimum(self.leaving, self.entering.T).min(axis=1))
        return replace(self, latency_s=latency, leaving=rate, entering=rate)

    @property
    def one_way(self) -> bool:
        """Whether any pair's directions differ."""
        return not (np.array_equal(self.latency_s, self.latency_s.T) and np.array_equal(self.leaving, self.entering.T))

    def slowest(self, uses: PairUses, orders: Integers, *, inside: bool | None = None) -> Link[Floats]:
        """[items, pipelines]: the largest latency, and the lowest share of a bandwidth, of an item's links. `orders`
        [pipelines, nodes] are kinds. With `inside`, only of links inside nodes, or between them; 0 of none."""
        here, there = orders.T[uses.sources], orders.T[uses.targets]
        stays = (uses.sources == uses.targets)[:, np.newaxis]
        outside = np.maximum(
            self.leaving[here, there] * np.maximum(uses.leaving[:, np.newaxis], self.alone[here]),
            self.entering[here, there] * np.maximum(uses.entering[:, np.newaxis], self.alone[there]),
        )
        if (self.leaf >= 0).any():
            starts = np.zeros(1, np.int64) if uses.together else uses.starts
            outside = np.maximum(outside, self.of_uplinks(here, there, uses.flows, starts))
        latency = np.where(stays, self.inside.latency_s[here], self.latency_s[here, there])
        rate = np.where(stays, self.inside.s_per_byte[here], outside)
        if inside is not None:
            latency, rate = latency * (stays == inside), rate * (stays == inside)
        return Link(
            latency_s=np.maximum.reduceat(latency, uses.starts, axis=0),
            s_per_byte=np.maximum.reduceat(rate, uses.starts, axis=0),
        )

    def of_uplinks(self, here: Integers, there: Integers, flows: Integers, starts: Integers) -> Floats:
        """[uses, pipelines]: seconds per byte that uplinks leave to one rank, at most; 0 where none is passed.

        So many ranks send from each node to another one, of these kinds, at the same time in each run of uses that
        begins at `starts`.
        """
        sizes, found = np.diff([*starts, len(flows)]), np.zeros(here.shape)
        crosses = self.leaf[here] != self.leaf[there]
        for leaf in range(self.leaf.max() + 1):
            for kinds in (here, there):
                passes = crosses & (self.leaf[kinds] == leaf)
                sharing = np.repeat(np.add.reduceat(passes * flows[:, np.newaxis], starts, axis=0), sizes, axis=0)
                found = np.maximum(found, passes * sharing * self.uplinks[kinds])
        return found
