"""Links that messages take: between two stages, or of one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conf.schema.experiment import Cluster
from conf.schema.values.links import pairs
from fasop.costs.network.links import Link, between, transfer_s, within
from megatron_ext.contract.events import ACTIVATIONS, ALL_REDUCE, GRADIENTS, TENSOR, WEIGHTS
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change
from reports.path.graph import EdgeKind, Graph, Integers
from reports.readers.record import Traffic

TIMES = 10
"""An order of magnitude."""
SENT_FOR = {
    EdgeKind.GRADIENTS: ALL_REDUCE,
    EdgeKind.EMBEDDING: ALL_REDUCE,
    EdgeKind.WEIGHTS: WEIGHTS,
    EdgeKind.TENSOR: TENSOR,
}
PROBE = 1 << 20
"""Bytes of a message by which links are compared whose bandwidth depends on the size."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    sent: Mapping[int, Mapping[str, float]]
    """Bytes of an iteration by rank that counted them and by kind (`megatron_ext.contract.events`)."""
    links: Mapping[int, Link[float]]
    """The slowest link that each rank may have used, shared by the ranks of its node."""

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster | None, traffic: Mapping[int, Traffic]) -> Allowed | None:
        """None where the cluster is not known, or no rank counted anything."""
        counted = {rank: one for rank, one in traffic.items() if one.samples}
        if cluster is None or not counted:
            return None
        return cls(
            sent={
                rank: {kind: count / one.samples * plan.global_batch_size for kind, count in one.bytes.items()}
                for rank, one in counted.items()
            },
            links=_links(plan, cluster),
        )

    def message_ns(self, rank: int, messages: int) -> float | None:
        """Returns what each message of a rank may take; None where its bytes are not known."""
        if rank not in self.sent or rank not in self.links:
            return None
        sent = self.sent[rank]
        size = (sent.get(ACTIVATIONS, 0.0) + sent.get(GRADIENTS, 0.0)) / max(messages, 1)
        return TIMES * self.links[rank].takes(size) * 1e9

    def collectives_ns(self, rank: int, kind: EdgeKind, count: int, ranks: int) -> float | None:
        """Returns what all collectives of a kind may take a rank in an iteration, in groups of so many ranks; their
        bytes are at most those of all collectives that they are counted with."""
        if rank not in self.sent or rank not in self.links:
            return None
        link, sent = self.links[rank], self.sent[rank].get(SENT_FOR[kind], 0.0)
        return TIMES * (2 * max(ranks - 1, 1) * count * link.latency_s + sent * link.s_per_byte) * 1e9


def _links(plan: Plan, cluster: Cluster) -> dict[int, Link[float]]:
    nodes = {node.name: node for node in plan.planned_nodes}
    used, table = {node.group for node in nodes.values()}, pairs(cluster.links, cluster.groups)
    ranks: dict[str, list[int]] = {}
    for place in plan.ranks:
        ranks.setdefault(plan.node_of(place.rank), []).append(place.rank)
    found = dict[int, Link[float]]()
    for name, own in ranks.items():
        if name not in nodes or nodes[name].group not in cluster.groups:
            continue
        group = cluster.groups[nodes[name].group]
        link = between(group, len(own)) if len(ranks) > 1 else within(group)
        for (row, column), pair in table.items() if len(ranks) > 1 else ():
            if row == nodes[name].group and column in used:
                takes_s = transfer_s(pair, PROBE)
                link = replace(
                    link,
                    latency_s=max(link.latency_s, (pair.latency_us or 0.0) * 1e-6),
                    s_per_byte=max(link.s_per_byte, len(own) * (takes_s or 0.0) / PROBE),
                )
        found |= dict.fromkeys(own, link)
    return found


SLOWER = 1.5
"""Times the median of others like them, from which messages are slow."""


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The messages from one node to another, from one stage to another, on the edges of these numbers."""

    sender: str
    receiver: str
    stages: tuple[int, int]
    edges: Sequence[Sequence[int]]
    """Numbers of the edges in each graph."""
    usual_ns: float
    allowed_ns: float | None
    """What one of its messages may take by its bytes, if that is known."""


def links(graphs: Sequence[Graph], plan: Plan, allowed: Allowed | None = None) -> Iterator[Change]:
    """Each link between two stages twice as fast in both directions. Where the messages of some nodes take longer than
    those of other replicas, or those of one node longer than all others, only these.

    A link is at fault for what its messages take beyond SLOWER times the median of others like them: on other links
    that lead from node to node, or stay within one, as it does, or the other way on the same link. Where all are
    equally slow, only their bytes tell (`reports/path/links.py`).
    """
    ways = _ways(graphs, plan, allowed)
    for pair in sorted({tuple(sorted(way.stages)) for way in ways}):
        yield _between(graphs, pair[0], pair[1], ways)
    yield from _of_nodes(graphs, ways)


def _ways(graphs: Sequence[Graph], plan: Plan, allowed: Allowed | None) -> list[_Way]:
    stages = [place.stage for place in plan.ranks]
    found: dict[tuple[str, str, int, int], list[list[int]]] = {}
    may = dict[tuple[str, str, int, int], list[float]]()
    messages = Counter(graphs[0].sender[graphs[0].sender >= 0].tolist())
    for at, graph in enumerate(graphs):
        for number in np.flatnonzero(graph.sender >= 0).tolist():
            sender, receiver = int(graph.sender[number]), int(graph.on[number])
            key = plan.node_of(sender), plan.node_of(receiver), stages[sender], stages[receiver]
            found.setdefault(key, [[] for _ in graphs])[at].append(number)
            if allowed is not None and (ns := allowed.message_ns(sender, messages[sender])) is not None:
                may.setdefault(key, []).append(ns)
    return [
        _Way(
            sender=one,
            receiver=other,
            stages=(stage, to),
            edges=edges,
            allowed_ns=max(may.get((one, other, stage, to), ()), default=None),
            usual_ns=float(
                np.median(np.concatenate([graph.lasts_ns[own] for graph, own in zip(graphs, edges, strict=True)]))
            ),
        )
        for (one, other, stage, to), edges in found.items()
    ]


def _between(graphs: Sequence[Graph], one: int, other: int, every: Sequence[_Way]) -> Change:
    """Returns the change of the link between two stages."""
    ways = [way for way in every if tuple(sorted(way.stages)) == (one, other)]
    slowest = max(ways, key=lambda way: way.usual_ns)
    message = f"from stage {slowest.stages[0]} to stage {slowest.stages[1]}"
    alike = [way.usual_ns for way in ways if way.stages == slowest.stages and way != slowest]
    if alike and slowest.usual_ns > SLOWER * (usual := float(np.median(alike))):
        nodes = {slowest.sender, slowest.receiver}
        ways = [way for way in ways if {way.sender, way.receiver} == nodes]
        where = f" between {' and '.join(sorted(nodes))}" if len(nodes) > 1 else f" on {slowest.sender}"
        because = (
            f"A message {message} takes {_ms(slowest.usual_ns)} from {slowest.sender} to {slowest.receiver}, but "
            f"{_ms(usual)} in other replicas."
        )
        change = f"the link between stages {one} and {other}{where} twice as fast"
    else:
        because = f"A message {message} takes {_ms(slowest.usual_ns)}."
        change = f"the link between stages {one} and {other} twice as fast"
    return Change(
        cause=Cause.LINK,
        change=change,
        because=because,
        lasts_ns=_twice_as_fast(graphs, ways),
        healthy_ns=_healthy(graphs, ways, every),
    )


def _of_nodes(graphs: Sequence[Graph], ways: Sequence[_Way]) -> Iterator[Change]:
    """Nodes whose messages to or from all their neighbours take longer than those between other nodes."""
    apart = [way for way in ways if way.sender != way.receiver]
    for node in sorted({way.sender for way in apart}):
        own = [way for way in apart if node in (way.sender, way.receiver)]
        others = [way.usual_ns for way in apart if node not in (way.sender, way.receiver)]
        slowest: dict[str, float] = {}
        for way in own:
            neighbour = way.receiver if way.sender == node else way.sender
            slowest[neighbour] = max(slowest.get(neighbour, 0.0), way.usual_ns)
        usual = float(np.median(others)) if others else np.inf
        if len(slowest) > 1 and min(slowest.values()) > SLOWER * usual:
            because = (
                f"Messages to and from {node} take up to {_ms(max(slowest.values()))}; messages between other nodes "
                f"take {_ms(usual)}."
            )
            yield Change(
                cause=Cause.LINK,
                change=f"the network of {node} twice as fast",
                because=because,
                lasts_ns=_twice_as_fast(graphs, own),
                healthy_ns=_healthy(graphs, own, ways),
            )


def _twice_as_fast(graphs: Sequence[Graph], ways: Sequence[_Way]) -> list[Integers]:
    found = [graph.lasts_ns.copy() for graph in graphs]
    for at, lasts in enumerate(found):
        lasts[[number for way in ways for number in way.edges[at]]] //= 2
    return found


def _healthy(graphs: Sequence[Graph], ways: Sequence[_Way], every: Sequence[_Way]) -> list[Integers]:
    """The lengths where no message of some ways takes longer than it may."""
    found = [graph.lasts_ns.copy() for graph in graphs]
    for way in ways:
        apart = way.sender != way.receiver
        others = [one.usual_ns for one in every if one != way and (one.sender != one.receiver) == apart]
        limits = [] if way.allowed_ns is None else [way.allowed_ns]
        limits += [SLOWER * float(np.median(others))] if others else []
        if limits:
            for lasts, own in zip(found, way.edges, strict=True):
                lasts[own] = np.minimum(lasts[own], min(limits))
    return found


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f} ms"
