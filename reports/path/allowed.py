"""What messages and collectives may take: what their bytes cost on the links that the configuration describes.

The figures of links are typical ones, and small messages and busy hosts do not reach them. So a link is at fault only
if it takes TIMES as long; what ranks sent they have counted themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from conf.schema.experiment import Cluster
from conf.schema.values.links import pairs
from fasop.costs.network.links import Link, between, transfer_s, within
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.traffic import ACTIVATIONS, ALL_REDUCE, GRADIENTS, TENSOR, WEIGHTS
from reports.path.graph import Kind
from reports.readers.record import Traffic

TIMES = 10
"""An order of magnitude."""
SENT_FOR = {
    Kind.GRADIENTS: ALL_REDUCE,
    Kind.EMBEDDING: ALL_REDUCE,
    Kind.WEIGHTS: WEIGHTS,
    Kind.TENSOR: TENSOR,
}
PROBE = 1 << 20
"""Bytes of a message by which links are compared whose bandwidth depends on the size."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    sent: Mapping[int, Mapping[str, float]]
    """By rank that counted them, bytes of an iteration by kind (`megatron_ext.contract.traffic`)."""
    links: Mapping[int, Link[float]]
    """By rank, the slowest that it may have used, shared by the ranks of its node."""

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
        """Of each of the messages that a rank sends in an iteration; None where its bytes are not known."""
        if rank not in self.sent or rank not in self.links:
            return None
        sent = self.sent[rank]
        size = (sent.get(ACTIVATIONS, 0.0) + sent.get(GRADIENTS, 0.0)) / max(messages, 1)
        return TIMES * self.links[rank].takes(size) * 1e9

    def collectives_ns(self, rank: int, kind: Kind, count: int, ranks: int) -> float | None:
        """Of all of a kind that a rank takes part in in an iteration, in groups of so many ranks; the bytes are at most
        those of all collectives that its own are counted with."""
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
