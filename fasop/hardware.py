"""The kinds of nodes of a cluster, with what is known of their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.profile import LayerProfile, read_profile
from conf.schema import Cluster, Gpu, NodeGroup
from fasop.errors import SearchError


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """A node group, ready to be searched."""

    name: str
    group: NodeGroup
    gpu: Gpu
    gpus: int
    """Of one node."""
    profile: LayerProfile | None
    """None: its GPUs were not measured."""


def node_kinds(cluster: Cluster) -> Sequence[NodeKind]:
    """In the cluster's order.

    Raises:
        ConfigError: a GPU names a profile that cannot be read.
        SearchError: a group does not tell how many GPUs its nodes have.
    """
    kinds = []
    for name, group in cluster.groups.items():
        if group.gpus_per_node is None:
            raise SearchError(
                f"cluster.groups.{name}.gpus_per_node=null: a search must know how many ranks the node is to run; "
                f"give cluster.groups.{name}.gpus_per_node=4, for example"
            )
        gpu = cluster.gpus[group.gpu]
        profile = None if gpu.profile is None else read_profile(gpu.profile)
        kinds.append(NodeKind(name=name, group=group, gpu=gpu, gpus=group.gpus_per_node, profile=profile))
    return kinds


def gpus_of(kinds: Sequence[NodeKind]) -> int:
    """Of all nodes of these kinds."""
    return sum(kind.gpus * kind.group.count for kind in kinds)
