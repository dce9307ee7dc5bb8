"""Measured links against the configured ones; whether nodes reach each other, and strangers the ranks."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conf.schema.experiment import Experiment
from conf.schema.values.links import KEY, pairs
from conf.visible import plural
from fasop.costs.hardware_doubts import node_doubts
from fasop.costs.network.link_doubts import link_doubts
from fasop.costs.network.links import transfer_s
from fasop.costs.sizes import activation_bytes
from launch.doctor.findings import Check, Fault, Level, Link, NodeFindings, check

SLOW = 2.0
"""A message may take so many times as long as by the configuration. Protocols cost some 20 %; beyond twice it is
another wire, another adapter or another figure than was thought, and plans are ranked by what is not so."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way between two nodes, or between two neighbours within one."""

    ends: tuple[str, str]
    """Names of the nodes."""
    sharing: int
    """Pairs of ranks that used it at once."""
    latency_us: float
    gbit_per_s: tuple[float, float]
    """The rate of all pairs together, from the first end to the second and back."""


def _message_us(latency_us: float, gbit_per_s: float, size: float) -> float:
    return latency_us + size * 8 / (gbit_per_s * 1e3)


def links(experiment: Experiment, nodes: Sequence[NodeFindings]) -> Iterator[Check]:
    """A check for the links within the nodes of a group, and for those between two groups, or between a group's own;
    and of what is hard to believe of the configuration's table of pairs."""
    groups = {node.name: node.group for node in nodes}
    paths: dict[tuple[bool, str, str], list[Path]] = {}
    for path in measured(nodes):
        first, second = sorted((groups[end] for end in path.ends), key=list(groups.values()).index)
        paths.setdefault((path.ends[0] != path.ends[1], first, second), []).append(path)
    for (between, first, second), found in sorted(paths.items(), key=lambda item: item[0][0]):
        yield _judge(experiment, groups, between, (first, second), found)
    cluster = experiment.cluster
    for doubt in link_doubts(cluster.groups, pairs(cluster.links, cluster.groups)):
        yield Check(Level.warning, "cluster.links", "links between nodes", doubt)
    for doubt in node_doubts(cluster.groups, {name: cluster.gpus[own.gpu] for name, own in cluster.groups.items()}):
        yield Check(Level.warning, "cluster", "figures of nodes", doubt)


def measured(nodes: Sequence[NodeFindings]) -> list[Path]:
    """Links by what they share: each of those within a node is alone, those between two nodes are one path."""
    of = {rank.rank: node.name for node in nodes for rank in node.ranks}
    shared: dict[tuple[str, str, int | None], list[Link]] = {}
    for rank, link in [(one.rank, link) for node in nodes for one in node.ranks for link in one.links]:
        if link.to not in of:  # its node is lost: reported elsewhere
            continue
        ends = of[rank], of[link.to]
        shared.setdefault((*ends, rank if ends[0] == ends[1] else None), []).append(link)
    return [
        Path(
            ends=(first, second),
            sharing=len(together),
            latency_us=statistics.median(link.latency_us for link in together),
            gbit_per_s=(sum(link.gbit_per_s for link in together), sum(link.gbit_per_s_back for link in together)),
        )
        for (first, second, _), together in shared.items()
    ]


@dataclass(frozen=True, kw_only=True)
class OneWay:
    """A path in one direction, as it was measured and as it is configured."""

    path: Path
    groups: tuple[str, str]
    """That of the sender, and that of the receiver."""
    gbit_per_s: float
    latency_us: float
    configured_gbit_per_s: float
    """For a message of the plan."""
    configured_latency_us: float
    ratio: float
    """How many times as long as by the configuration a message of the plan takes."""


def _judge(
    experiment: Experiment, groups: Mapping[str, str], between: bool, pair: tuple[str, str], paths: Sequence[Path]
) -> Check:
    """Judges a link by the path and direction that is worst against the configuration."""
    kind = "inter" if between else "intra"
    ways = [_one_way(experiment, groups, kind, path, way) for path in paths for way in (0, 1)]
    worst = max(ways, key=lambda one: one.ratio)
    table = pairs(experiment.cluster.links, experiment.cluster.groups) if between else {}
    own = pair in table
    where = pair[0] if pair[0] == pair[1] else " - ".join(pair)
    ends = worst.path.ends[0] if not between else " - ".join(worst.path.ends)
    text = (
        f"{worst.gbit_per_s:.3g} Gbit/s, {worst.latency_us:.3g} us"
        + (f" (slowest of {len(paths)}: {ends})" if len(paths) > 1 else "")
        + (f" from {worst.groups[0]} to {worst.groups[1]}" if own and pair[0] != pair[1] else "")
        + f"; configured {worst.configured_gbit_per_s:.4g} Gbit/s, {worst.configured_latency_us:g} us; a message of "
        f"the plan takes {worst.ratio:.2g} times as long as configured"
    )
    if worst.ratio > SLOW:
        interface = "the network in use (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME)" if between else "the bus"
        keys = " or ".join(dict.fromkeys(f"cluster.groups.{name}" for name in pair))
        figures = f"{kind}_gbit_per_s and {kind}_latency_us of {keys}"
        text += f"; check {interface}, or correct {'.'.join([KEY, *worst.groups]) if own else figures}"
    return Check(
        Level.warning if worst.ratio > SLOW else Level.ok,
        where,
        "links between nodes" if between else "links in a node",
        text,
    )


def _one_way(experiment: Experiment, groups: Mapping[str, str], kind: str, path: Path, way: int) -> OneWay:
    """The configuration's own figures are those of the slower group, as in a rehearsal, where its table of pairs says
    nothing else."""
    cluster = experiment.cluster
    source, target = (groups[end] for end in (path.ends if way == 0 else path.ends[::-1]))
    ends = [cluster.groups[source], cluster.groups[target]]
    sent = activation_bytes(experiment.model, experiment.parallel.micro_batch_size, experiment.train.precision)
    size = max(1, sent)  # of a module whose messages nobody knows
    gbit_per_s = min(getattr(group, f"{kind}_gbit_per_s") for group in ends)
    latency_us = max(getattr(group, f"{kind}_latency_us") for group in ends)
    link = pairs(cluster.links, cluster.groups).get((source, target)) if kind == "inter" else None
    if link is not None:
        latency_us = latency_us if link.latency_us is None else link.latency_us
        seconds = transfer_s(link, size)
        gbit_per_s = gbit_per_s if seconds is None else size * 8e-9 / seconds
    whole = size * path.sharing
    measured_us = _message_us(path.latency_us, path.gbit_per_s[way], whole)
    return OneWay(
        path=path,
        groups=(source, target),
        gbit_per_s=path.gbit_per_s[way],
        latency_us=path.latency_us,
        configured_gbit_per_s=gbit_per_s,
        configured_latency_us=latency_us,
        ratio=measured_us / _message_us(latency_us, gbit_per_s, whole),
    )


def reached(group: str, nodes: Sequence[NodeFindings], works: bool) -> Check:
    """Whether a group's nodes reach all others. Where ranks met all the same, by another network, it is not what runs
    need: `works`."""
    level = Level.warning if works else Level.error
    faults = [fault for node in nodes for fault in _unreached(node, node.unreached, level, "")]
    advice = (
        "nodes must reach every TCP port of each other's addresses; choose the interface with "
        "cluster.environment.GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )
    return check(group, "ports", faults, "all nodes reach each other", advice)


def _unreached(node: NodeFindings, others: Mapping[str, str], level: Level, what: str) -> list[Fault]:
    """A fault for each reason why a node cannot reach others."""
    whys: dict[str, list[str]] = {}
    for name, why in others.items():
        whys.setdefault(why, []).append(name)
    return [Fault(level, node.name, f"cannot reach {what}{', '.join(names)} ({why})") for why, names in whys.items()]


def interfaces(group: str, nodes: Sequence[NodeFindings], works: bool) -> Iterator[Check]:
    """Which interface the library of the messages takes on a group's nodes, and whether the other nodes reach it."""
    found = [(node, node.taken) for node in nodes if node.taken is not None]
    if not found:
        return
    level = Level.warning if works else Level.error
    faults = []
    for node, taken in found:
        if taken.address is None or _is(taken.address, "is_loopback"):
            faults.append(Fault(level, node.name, f"{taken}, which no other node can reach"))
        faults += _unreached(node, node.unreached_messages, level, f"the address that {taken.library} uses on ")
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
            Level.warning,
            node.name,
            f"ranks listen on {_place(node)}, a public address; choose an interface of the cluster's own network "
            "with cluster.environment.GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or keep others out with a firewall",
        )
        for node in listening
        if node.address and _is(node.address, "is_global")
    ]
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
