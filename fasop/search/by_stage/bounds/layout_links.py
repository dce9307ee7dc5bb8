"""What messages and sums of many layouts take on the links of their nodes, at least, on nodes in one order.

Between a node and others of several kinds the quickest pair counts (`cluster.links`), of both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import sizes
from fasop.costs.arrays import Floats, Integers, distinct, rolled
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_table import LinkTable
from fasop.costs.network.links import Link
from fasop.costs.profiles.steps import Operation
from fasop.costs.training import Training
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch


class _Peers(NamedTuple):
    """What a byte takes between nodes and those of one kind, or of any."""

    nodes: NDArray[np.bool_]
    """[nodes]: those of the kind."""
    latency_s: Floats
    """[nodes]: from each, or to it."""
    own: Floats
    """[nodes]: seconds per byte of a rank of each."""
    theirs: Floats
    """[nodes]: of one of the peers."""

    def among(self, begin: Integers, end: Integers) -> NDArray[np.bool_]:
        """Return whether there are any from the node `begin` up to the node `end`."""
        if self.nodes.all():
            return begin <= end
        before = np.array([0, *np.cumsum(self.nodes)])
        return before[np.minimum(end + 1, len(self.nodes))] > before[begin]


class LayoutLinks:
    """Layouts on nodes in their order."""

    def __init__(self, layouts: LayoutBatch, nodes: Sequence[NodeKind]) -> None:
        self._layouts, self._nodes = layouts, nodes
        self._kinds = [*{node.name: node for node in nodes}.values()]
        names = [kind.name for kind in self._kinds]
        self._kind = np.array([names.index(node.name) for node in nodes])

    @property
    def _measured(self) -> bool:
        return any(kind.collectives is not None for kind in self._kinds)

    @cached_property
    def _node(self) -> Integers:
        """[GPUs]: the number of the node that each lies in."""
        return np.array([number for number, node in enumerate(self._nodes) for _ in range(node.gpus)])

    def messages(self, every: Sequence[float]) -> Floats:
        """[layouts, stages, 3]: seconds of a message from each stage to the next one, and for how long it occupies its
        link, at least, if it has any of so many bytes; and whether messages to both neighbours leave by one link: 0
        behind the last stage.
        """
        of_sizes = [self._messages_of(size) for size in every]
        least = np.minimum.reduce([of_size[:2] for of_size in of_sizes])
        found = np.concatenate([least, of_sizes[0][2:]])
        found[:, np.arange(found.shape[2]) >= self._layouts.last[:, np.newaxis]] = 0.0
        return np.ascontiguousarray(np.moveaxis(found, 0, 2))

    def _messages_of(self, message: float) -> Floats:
        """[3, layouts, stages], whatever is behind the last stage.

        Peers of ranks in a stage's first node lie in no earlier node than the next stage begins in, and peers of ranks
        in the next stage's last node in no later one than this stage ends in. So all ranks of such a node that have
        their peers elsewhere share its link.
        """
        first, ended, begun, final = self._cuts
        shape = first.shape
        exchange = Exchange(Operation.send_recv, 2, message)
        tables = [LinkTable.of(self._kinds, [kind.factors.messages for kind in self._kinds], message, exchange)]
        out, into = np.full((2, *shape), np.inf), np.full((2, *shape), np.inf)
        for peers in self._peers(tables):
            for found, here, (ranks, uplink), there in (
                (out, first, self._sides[0], (begun, final)),
                (into, final, self._sides[1], (first, ended)),
            ):
                rate = np.maximum(np.maximum(ranks * peers.own[here], peers.theirs[here]), uplink) * message
                seconds = np.array([peers.latency_s[here] + rate, rate])
                found[:] = np.where(peers.among(*there), np.minimum(found, seconds), found)
        leaving, coming = first < begun, ended < final
        within = tables[0].inside
        inside_rate = within.s_per_byte[self._kind] * message
        inside = np.array([(within.latency_s[self._kind] + inside_rate)[first], inside_rate[first]])
        messages = np.where(first == final, inside, 0.0)
        messages = np.maximum(messages, np.where(leaving, out, 0.0))
        messages = np.maximum(messages, np.where(coming, into, 0.0))
        comes_before = rolled(coming, 1, 1)  # from a stage all of which has its peers elsewhere
        both = leaving & comes_before & (first == ended)
        both[:, 0] = False
        return np.concatenate([messages, both[np.newaxis]])

    @cached_property
    def _cuts(self) -> tuple[Integers, Integers, Integers, Integers]:
        """[layouts, stages] each: the nodes in which each stage begins and ends, and the next one."""
        layouts, node, last = self._layouts, self._node, len(self._node) - 1
        first, begun = node[np.minimum(layouts.begins, last)], node[np.minimum(layouts.ends, last)]
        return first, node[layouts.ends - 1], begun, node[self._following - 1]

    @cached_property
    def _following(self) -> Integers:
        """[layouts, stages]: the first GPU behind the next stage."""
        following = rolled(self._layouts.ends, -1, 1)
        following[:, -1] = len(self._node)
        return following

    @cached_property
    def _sides(self) -> tuple[tuple[Integers, Floats], tuple[Integers, Floats]]:
        """How many ranks share the node's link, and the seconds that a byte takes on uplinks, [layouts, stages] each:
        where messages leave a stage's first node, and where they enter the next one's last."""
        layouts, nodes, (first, ended, begun, final) = self._layouts, self._nodes, self._cuts
        starts = np.searchsorted(self._node, np.arange(len(nodes) + 1))
        own, theirs = layouts.tensors, rolled(layouts.tensors, -1, 1)
        sending = (starts[first + 1] - layouts.begins) // own * np.minimum(own, theirs)
        receiving = self._following - np.maximum(layouts.ends, starts[final])
        up_out, up_in = (np.zeros(own.shape) for _ in range(2))
        for below, rate in self._leaves([kind.factors.messages for kind in nodes]):
            like = layouts.replicas == rolled(layouts.replicas, -1, 1)  # else one replica sends at a time, at least
            groups_out, groups_in = (starts[first + 1] - layouts.begins) // own, receiving // theirs
            before, of_group = np.array([0, *np.cumsum(below)]), rate * np.minimum(own, theirs)
            leaves = below[first] & (before[final + 1] == before[begun])  # all peers hang elsewhere
            comes = below[final] & (before[ended + 1] == before[first])
            up_out = np.maximum(up_out, np.where(leaves, of_group * np.where(like, groups_out, 1), 0.0))
            up_in = np.maximum(up_in, np.where(comes, of_group * np.where(like, groups_in, 1), 0.0))
        return (sending, up_out), (receiving, up_in)

    def _peers(self, tables: Sequence[LinkTable]) -> Iterator[_Peers]:
        """Those of each kind, with the least of these tables; where no pair has a link of its own, of any kind."""
        kind = self._kind
        latency = np.min([np.minimum(one.latency_s, one.latency_s.T) for one in tables], axis=0)
        rates = np.min([np.minimum(one.leaving, one.entering.T) for one in tables], axis=0)
        if not any(other.name in one.links for one in self._kinds for other in self._kinds):
            own, any_node = rates.diagonal()[kind], np.ones(len(kind), bool)
            yield _Peers(any_node, latency.diagonal()[kind], own, np.zeros(len(kind)))
            return
        for number in range(len(self._kinds)):
            yield _Peers(kind == number, latency[kind, number], rates[kind, number], rates[number, kind])

    def _peers_of_sums(self, factors: Sequence[float]) -> list[_Peers]:
        """Those where sums are exchanged, in messages of any size."""
        points = {size for kind in self._kinds for link in kind.links.values() for size, _ in link.gbit_per_s_by_bytes}
        sized = [
            LinkTable.of(self._kinds, factors, float(size), Exchange(Operation.all_reduce, 2, float(size)))
            for size in points or {1}
        ]
        return [*self._peers(sized)]

    @cached_property
    def s_per_gradient_byte(self) -> Floats:
        """[layouts, stages]: seconds in which replicas on several nodes reduce-scatter a byte, at least; 0 where this
        was measured."""
        layouts, node = self._layouts, self._node
        slowest = np.zeros(layouts.tensors.shape)
        if self._measured:
            return slowest
        begins, ends = node[np.minimum(layouts.begins, len(node) - 1)], node[np.maximum(layouts.ends - 1, 0)]
        crossing = (begins < ends) & layouts.exists
        every = self._peers_of_sums([kind.factors.gradients for kind in self._kinds])
        for number, (end, kind) in enumerate(
            zip(accumulate(one.gpus for one in self._nodes), self._nodes, strict=True)
        ):
            here = crossing & (layouts.begins < end) & (layouts.ends > end - kind.gpus)
            rings = (layouts.tensors * here).sum(axis=1, keepdims=True)  # those of all stages share the node's link
            quickest = np.full(here.shape, np.inf)
            for peers in every:
                others = peers._replace(nodes=peers.nodes & (np.arange(len(self._nodes)) != number))
                quickest = np.where(others.among(begins, ends), np.minimum(quickest, peers.own[number]), quickest)
            slowest = np.maximum(slowest, np.where(here, quickest, 0.0) * rings)
        for below, rate in self._leaves([one.factors.gradients for one in self._nodes]):
            inside = np.array([0, *np.cumsum(below[node])])
            own = inside[layouts.ends] - inside[layouts.begins]
            leaving = crossing & (own > 0) & (own < layouts.ends - layouts.begins)
            rings = (layouts.tensors * leaving).sum(axis=1, keepdims=True)
            slowest = np.maximum(slowest, np.where(leaving, rate * rings, 0.0))
        return slowest * (layouts.replicas - 1) / layouts.replicas

    def embedding(self, one: Training) -> Floats:
        """[layouts]: seconds in which the first and the last stage sum the embedding's gradients, at least: nothing
        where they may lie on one node, or where that was measured. All ranks of a stage that are on one node share its
        link."""
        layouts, nodes, node = self._layouts, self._nodes, self._node
        rows = np.arange(len(layouts.tensors))
        if self._measured:
            return np.zeros(len(rows))
        ended = node[layouts.ends[:, 0] - 1]
        begun = node[np.minimum(layouts.begins[rows, layouts.last], len(node) - 1)]
        ends = (layouts.tensors[:, 0], layouts.tensors[rows, layouts.last])
        replicas = np.array([layouts.replicas[:, 0], layouts.replicas[rows, layouts.last]])
        members = replicas.sum(axis=0) / replicas.min(axis=0)
        widths = (layouts.ends[:, 0], layouts.ends[rows, layouts.last] - layouts.begins[rows, layouts.last])
        first, last = np.zeros_like(ended), np.full_like(begun, len(nodes) - 1)
        sides = ((0, widths[0], (begun, last)), (len(nodes) - 1, widths[1], (first, ended)))
        every, taken = self._peers_of_sums([kind.factors.embedding for kind in self._kinds]), np.zeros(len(rows))
        for tensor in distinct(np.minimum(*ends)):
            shared, holders = sizes.shared_parameters(one.model, int(tensor))
            size = float(one.gradient_bytes * shared)
            for end, width, there in sides:
                quickest = np.full(len(rows), np.inf)
                for peers in every:
                    rate = np.maximum(np.minimum(width, nodes[end].gpus) * peers.own[end], peers.theirs[end])
                    link = Link(latency_s=np.full(len(rows), peers.latency_s[end]), s_per_byte=rate)
                    seconds = link.all_reduce(min(holders, 2)).takes(np.array(size))
                    quickest = np.where(peers.among(*there), np.minimum(quickest, seconds), quickest)
                taken = np.where(np.minimum(*ends) == tensor, np.maximum(taken, quickest), taken)
        apart = (ended < begun) & (layouts.last > 0)
        return np.where(apart, taken, 0.0) * (2 * (members - 1) / members)

    def _leaves(self, factors: Sequence[float]) -> Iterator[tuple[NDArray[np.bool_], float]]:
        """For each leaf switch: [nodes] whether they hang on it; and seconds of a byte of the one rank that passes its
        uplink, at least. `factors` are those of the nodes' times."""
        hanging = [None if node.uplink is None else node.uplink.leaf for node in self._nodes]
        for leaf in dict.fromkeys(filter(None, hanging)):
            uplinks = [
                factor * 8e-9 / node.uplink.gbit_per_s
                for factor, node in zip(factors, self._nodes, strict=True)
                if node.uplink is not None and node.uplink.leaf == leaf
            ]
            yield np.array([one == leaf for one in hanging]), min(uplinks)
