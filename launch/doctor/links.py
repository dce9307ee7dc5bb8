"""Measured links against those of the cluster's configuration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conf.schema.experiment import Experiment
from fasop.costs.sizes import activation_bytes
from launch.doctor.checks import Check, Level
from launch.doctor.findings import Link, NodeFindings

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
    gbit_per_s: float
    """Of all pairs together, in the slower direction."""

    def message_us(self, size: int) -> float:
        """How long it takes until every pair has a message of so many bytes."""
        return _message_us(self.latency_us, self.gbit_per_s, size * self.sharing)


def _message_us(latency_us: float, gbit_per_s: float, size: float) -> float:
    return latency_us + size * 8 / (gbit_per_s * 1e3)


def links(experiment: Experiment, nodes: Sequence[NodeFindings]) -> Iterator[Check]:
    """A check for the links within the nodes of a group, and for those between two groups, or between a group's own."""
    groups = {node.name: node.group for node in nodes}
    paths: dict[tuple[bool, str, str], list[Path]] = {}
    for path in measured(nodes):
        first, second = sorted((groups[end] for end in path.ends), key=list(groups.values()).index)
        paths.setdefault((path.ends[0] != path.ends[1], first, second), []).append(path)
    for (between, first, second), found in sorted(paths.items(), key=lambda item: item[0][0]):
        yield _judge(experiment, between, (first, second), found)


def measured(nodes: Sequence[NodeFindings]) -> list[Path]:
    """Links by what they share: each of those within a node is alone, those between two nodes are one path."""
    of = {rank.rank: node.name for node in nodes for rank in node.ranks}
    shared: dict[tuple[str, str, int | None], list[Link]] = {}
    for link in (link for node in nodes for rank in node.ranks for link in rank.links):
        if link.second not in of:  # its node is lost: reported elsewhere
            continue
        ends = of[link.first], of[link.second]
        shared.setdefault((*ends, link.first if ends[0] == ends[1] else None), []).append(link)
    return [
        Path(
            ends=(first, second),
            sharing=len(together),
            latency_us=statistics.median(link.latency_us for link in together),
            gbit_per_s=min(sum(link.gbit_per_s[way] for link in together) for way in (0, 1)),
        )
        for (first, second, _), together in shared.items()
    ]


def _judge(experiment: Experiment, between: bool, pair: tuple[str, str], paths: Sequence[Path]) -> Check:
    """By the slowest path. The configuration's own figures are those of the slower group, as in a rehearsal."""
    configured = [experiment.cluster.groups[name] for name in pair]
    kind = "inter" if between else "intra"
    gbit_per_s = min(getattr(group, f"{kind}_gbit_per_s") for group in configured)
    latency_us = max(getattr(group, f"{kind}_latency_us") for group in configured)
    size = activation_bytes(experiment.model, experiment.parallel.micro_batch_size, experiment.train.precision)
    slowest = max(paths, key=lambda path: path.message_us(size))
    ratio = slowest.message_us(size) / _message_us(latency_us, gbit_per_s, size * slowest.sharing)
    where = pair[0] if pair[0] == pair[1] else " - ".join(pair)
    ends = slowest.ends[0] if not between else " - ".join(slowest.ends)
    text = (
        f"{slowest.gbit_per_s:.3g} Gbit/s, {slowest.latency_us:.3g} us"
        + (f" (slowest of {len(paths)}: {ends})" if len(paths) > 1 else "")
        + f"; configured {gbit_per_s:g} Gbit/s, {latency_us:g} us; a message of the plan takes {ratio:.2g} x as long"
    )
    if ratio > SLOW:
        keys = " or ".join(dict.fromkeys(f"cluster.groups.{name}" for name in pair))
        interface = "the network in use (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME)" if between else "the bus"
        text += f"; look at {interface}, or correct {kind}_gbit_per_s and {kind}_latency_us of {keys}"
    return Check(
        level=Level.warning if ratio > SLOW else Level.ok,
        where=where,
        what="links between nodes" if between else "links in a node",
        text=text,
    )
