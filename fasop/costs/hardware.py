"""The kinds of nodes of a cluster, with what is known of their GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from conf.schema.cluster import Cluster, Gpu, NodeGroup
from conf.schema.values.links import PairLink, pairs
from conf.schema.values.ranges import config
from conf.schema.values.topology import Uplink, uplinks
from fasop.costs.network import links
from fasop.costs.network.collectives import Collectives, Exchange
from fasop.costs.network.links import Link
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import Operation
from fasop.errors import SearchError

LEAST, MOST = 0.01, 100.0
"""A factor beyond is not a calibration: something else is wrong."""


@config
class Factors:
    """What predicted times are multiplied by (fasop/costs/calibration.py); 1 leaves them as they are."""

    forward: float = 1.0
    backward: float = 1.0
    messages: float = 1.0
    gradients: float = 1.0
    embedding: float = 1.0
    optimizer: float = 1.0

    def __post_init__(self) -> None:
        for term, value in asdict(self).items():
            if not LEAST <= value <= MOST:
                raise SearchError(f"a factor for {term} must be from {LEAST:g} to {MOST:g}, not {value:g}")


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """A node group, ready to be searched."""

    name: str
    group: NodeGroup
    gpu: Gpu
    gpus: int
    """GPUs of one node."""
    profile: LayerProfile | None
    """None: its GPUs were not measured."""
    factors: Factors = field(default_factory=Factors)
    links: Mapping[str, PairLink] = field(default_factory=dict)
    """From its nodes to those of other kinds, or its own, by name; to the others by the groups' own figures."""
    uplink: Uplink | None = None
    """The uplink of its nodes' leaf switch, by which they reach nodes elsewhere."""

    @cached_property
    def known_times(self) -> dict[tuple[object, ...], Any]:
        """What is known of its GPUs' times (`fasop.simulation.nodes.times_on`)."""
        return {}

    @cached_property
    def known_links(self) -> dict[tuple[object, ...], Any]:
        """What is known of links between nodes of this and other kinds (`fasop.simulation.placed_links.on_pairs`)."""
        return {}

    @cached_property
    def collectives(self) -> Collectives | None:
        """What was measured of collectives between its GPUs; None: nothing."""
        return Collectives(self.profile.collectives) if self.profile and self.profile.collectives else None

    def measured(self, exchange: Exchange, *, between: bool) -> Link[float] | None:
        """The link that what ranks exchange was measured to have; None: it was not measured."""
        known = self.collectives
        if known is None:
            return None
        return known.link(exchange, gpus=self.gpus, between=between, nics=self.group.nics if between else 1)

    def within(self, exchange: Exchange) -> Link[float]:
        """The link between two GPUs of a node, by what they exchange where that was measured."""
        return self.measured(exchange, between=False) or links.within(self.group)

    def alone(self, exchange: Exchange) -> float:
        """Returns as how many ranks, or rings, that share all of a node's cards one by itself counts: it has the cards
        of its own GPUs, of a message one."""
        gpus = self.group.gpus_per_node or self.gpus  # bounds ask for nodes of other sizes, whose cards stay
        used = 1 if exchange.operation is Operation.send_recv else exchange.on_node(gpus)
        return max(1.0, self.group.nics / used)

    def between(self, exchange: Exchange) -> Link[float]:
        """The link out of a node, through all its network cards, for one of its ranks, or one ring."""
        return self.measured(exchange, between=True) or links.between(self.group, 1)


def node_kinds(cluster: Cluster) -> Sequence[NodeKind]:
    """In the cluster's order.

    Raises:
        ConfigError: a GPU names a profile that cannot be read.
        SearchError: a group does not say how many GPUs its nodes have.
    """
    kinds, of_pairs, of_leaves = [], pairs(cluster.links, cluster.groups), uplinks(cluster.topology, cluster.groups)
    for name, group in cluster.groups.items():
        if group.gpus_per_node is None:
            raise SearchError(
                f"cluster.groups.{name}.gpus_per_node=null: a prediction needs the number of ranks of the node; give "
                f"cluster.groups.{name}.gpus_per_node=4, for example"
            )
        gpu = cluster.gpus[group.gpu]
        profile = None if gpu.profile is None else read_profile(gpu.profile)
        kinds.append(
            NodeKind(
                name=name,
                group=group,
                gpu=gpu,
                gpus=group.gpus_per_node,
                profile=profile,
                links={column: link for (row, column), link in of_pairs.items() if row == name},
                uplink=of_leaves.get(name),
            )
        )
    return kinds


def has_prices(nodes: Sequence[NodeKind]) -> bool:
    """Whether any of them pays for what it sends to another group."""
    kinds = {node.name: node for node in nodes}.values()
    return any(link.price_per_gb for kind in kinds for link in kind.links.values())


def gpus_of(kinds: Sequence[NodeKind]) -> int:
    """Count the GPUs of all nodes of these kinds."""
    return sum(kind.gpus * kind.group.count for kind in kinds)
