"""The switches of `cluster.topology`: which groups' nodes hang on a leaf switch, and the rate of its uplink.

Nodes of groups that no leaf names hang on the core, which all leaves join and which is never short of bandwidth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import Any, NamedTuple

from conf.errors import ConfigError
from conf.schema.values.links import check_group
from conf.schema.values.ranges import MISSING, check, config
from megatron_ext.contract.keys import option, positive

KEY = "cluster.topology"


@config
class Leaf:
    """A leaf switch."""

    groups: list[str] = field(default_factory=list)
    """Groups all of whose nodes hang on it, by their keys in `cluster.groups`."""
    gbit_per_s: float = option(MISSING, positive())
    """Bandwidth of its uplink each way, all cables together, which all messages to and from other nodes share."""


class Uplink(NamedTuple):
    """What the nodes of a group leave their leaf by."""

    leaf: str
    gbit_per_s: float


def uplinks(topology: Mapping[str, Leaf], groups: Collection[str]) -> dict[str, Uplink]:
    """The uplink of each group that hangs on a leaf. Raises ConfigError: the topology is none for these groups."""
    found = dict[str, Uplink]()
    for name, leaf in topology.items():
        key = f"{KEY}.{name}"
        check(key, leaf)
        if not leaf.groups:
            raise ConfigError(f"{key}.groups is empty: name the node groups that hang on the switch, or leave it out")
        for group in leaf.groups:
            check_group(f"{key}.groups", group, groups)
            if group in found:
                raise ConfigError(
                    f"{key}.groups: {KEY}.{found[group].leaf} has {group!r}, too; a group hangs on one leaf: define a "
                    f"group for the nodes of each leaf"
                )
            found[group] = Uplink(name, leaf.gbit_per_s)
    return found


def only(topology: Mapping[str, Leaf], groups: Collection[str]) -> dict[str, Any]:
    """What of a topology is of some groups."""
    kept = {name: [group for group in leaf.groups if group in groups] for name, leaf in topology.items()}
    return {name: replace(topology[name], groups=some) for name, some in kept.items() if some}
