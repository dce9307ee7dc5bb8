"""Whether the nodes reach each other, and where strangers could reach the ranks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from conf.schema.experiment import EngineKind, Experiment
from conf.visible import plural
from launch.doctor.checks import Check, Fault, Level, check
from launch.doctor.findings import NodeFindings


def reached(group: str, nodes: Sequence[NodeFindings], works: bool) -> Check:
    """Whether a group's nodes reach all others. Where ranks met all the same, by another network, it is not what runs
    need: `works`."""
    faults = []
    for node in nodes:
        whys: dict[str, list[str]] = {}
        for name, why in node.unreached.items():
            whys.setdefault(why, []).append(name)
        faults += [
            Fault(
                level=Level.warning if works else Level.error,
                node=node.name,
                text=f"cannot reach {', '.join(names)} ({why})",
            )
            for why, names in whys.items()
        ]
    advice = (
        "nodes must reach every TCP port of each other's addresses; choose the interface with "
        "cluster.environment.GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )
    return check(group, "ports", faults, "all nodes reach each other", advice)


def interfaces(group: str, nodes: Sequence[NodeFindings], works: bool) -> Iterator[Check]:
    """Which interface the library of the messages takes on a group's nodes, and whether the other nodes reach it."""
    found = [(node, node.taken) for node in nodes if node.taken is not None]
    if not found:
        return
    level = Level.warning if works else Level.error
    faults = []
    for node, taken in found:
        if taken.address is None or _is(taken.address, "is_loopback"):
            faults.append(Fault(level=level, node=node.name, text=f"{taken}, which no other node can reach"))
        whys: dict[str, list[str]] = {}
        for name, why in node.unreached_messages.items():
            whys.setdefault(why, []).append(name)
        faults += [
            Fault(
                level=level,
                node=node.name,
                text=f"cannot reach the address that {taken.library} uses on {', '.join(names)} ({why})",
            )
            for why, names in whys.items()
        ]
    library = found[0][1].library
    advice = f"set cluster.environment.{library.upper()}_SOCKET_IFNAME to the interface of the nodes' own network"
    places = dict.fromkeys(f"{taken.interface or taken.address}: {taken.why}" for _, taken in found)
    own = [
        place if "resolves to" not in place else place.partition(":")[0] + ", by the host's name" for place in places
    ]
    yield check(group, "interface", faults, f"{library} uses {'; '.join(dict.fromkeys(own))}", advice)


def open_ports(experiment: Experiment, group: str, nodes: Sequence[NodeFindings]) -> Iterator[Check]:
    """Where a group's ranks listen; nothing if only their own node can connect."""
    listening = [node for node in nodes if node.address and not _is(node.address, "is_loopback")]
    faults = [
        Fault(
            level=Level.warning,
            node=node.name,
            text=f"ranks listen on {_place(node)}, a public address; choose an interface of the cluster's own network "
            "with cluster.environment.GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or keep others out with a firewall",
        )
        for node in listening
        if node.address and _is(node.address, "is_global")
    ]
    if experiment.engine.kind is EngineKind.megatron_lm and group == experiment.node_order.groups[0]:
        port = experiment.executor.master_port or "a free port"
        text = (
            f"torchrun's store listens on {port} of all interfaces and unpickles what anybody sends; keep others out "
            f"with a firewall, or use engine=tdpp"
        )
        faults.append(Fault(level=Level.warning, node=nodes[0].name, text=text))
    if listening or faults:
        places = ", ".join(dict.fromkeys(map(_place, listening[:_SHOWN])))
        more = f" and on {plural(len(listening) - _SHOWN, 'more node')}" if len(listening) > _SHOWN else ""
        fine = f"ranks listen on free ports of {places}{more}; gloo and NCCL accept anybody who can reach them"
        yield check(group, "open ports", faults, fine)


_SHOWN = 2


def _place(node: NodeFindings) -> str:
    return f"{node.address} ({node.interface})" if node.interface else str(node.address)


def _is(address: str, what: str) -> bool:
    return bool(getattr(ipaddress.ip_address(address.split("%")[0]), what))
