"""What megatron_ext.doctor wrote down on the nodes (docs/formats.md), typed, and a line of what `tdpp doctor` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from conf.run_folder.rundir import RunDir
from megatron_ext.contract.plan_parts import Node


class Level(StrEnum):
    """How bad a finding is, in the order of weight."""

    ok = "ok"
    warning = "warning"
    """Runs would work, but not as they should."""
    error = "error"
    """A run would fail."""


_WEIGHT = list(Level)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line."""

    level: Level
    where: str
    """`here`, a node group, two of them, or `all nodes`."""
    what: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is wrong with one node."""

    level: Level
    node: str
    text: str


def check(where: str, what: str, faults: Iterable[Fault], fine: str, advice: str = "") -> Check:
    """The worst fault gives the level; nodes with the same fault are named together; `fine` is said without any.

    `advice` is the way out of all of them.
    """
    nodes: dict[str, list[str]] = {}
    level = Level.ok
    for fault in faults:
        nodes.setdefault(fault.text, []).append(fault.node)
        level = max(level, fault.level, key=_WEIGHT.index)
    named = [f"{', '.join(names)}: {text}" for text, names in nodes.items()]
    text = "; ".join([*named, *([advice] if advice else [])]) if named else fine
    return Check(level=level, where=where, what=what, text=text)


ALONE = "alone"
"""The stage in which a rank needs no other one."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What two ranks measured between them."""

    first: int
    second: int
    latency_us: float
    gbit_per_s: tuple[float, float]
    """From the first to the second, and back."""


@dataclass(frozen=True, kw_only=True)
class RankFindings:
    """What a rank found out, as far as it came."""

    rank: int
    stage: str
    """alone, meeting, all-reduce, clocks, links, done."""
    exit_code: int | None
    """Negative for a signal; None where its node did not write it."""
    torch: str | None = None
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    """Names of all that torch sees."""
    memory: tuple[int, int] | None = None
    """The bytes of its own GPU: free, and all."""
    engine: str | None = None
    """What its engine takes beside torch, in words."""
    no_engine: str | None = None
    """Why it could not train."""
    failed: str | None = None
    symptom: bool = False
    """Whether it failed only because another rank was lost."""
    hindrance: str | None = None
    """Why it did not try to meet the others."""
    all_reduce_ms: float | None = None
    clock: tuple[int, int] | None = None
    """Its node's time of day against rank 0's, ns: ahead by, known to."""
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The address that gloo or nccl takes on a node, by its own rules."""

    library: str
    address: str | None
    """None: there is none that its variable allows."""
    interface: str | None
    why: str

    def __str__(self) -> str:
        place = "no interface" if self.address is None else f"{self.address} ({self.interface or 'on no interface'})"
        return f"{self.library} uses {place}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class NodeFindings:
    """What was found on a node, as far as it came."""

    name: str
    group: str
    wanted: int
    """Ranks that the plan has there."""
    host: str
    python: str
    cpus: int
    """That its processes may use."""
    files: Mapping[str, int | str]
    """The bytes of each file, by path, or why it cannot be read."""
    maps: Mapping[str, Path | str]
    """Where the index maps of a corpus would be written, by its prefix, or why they cannot be."""
    disk: int | None
    shared_memory: int | None
    """Bytes free: where the run folder is, and in /dev/shm."""
    address: str | None = None
    """On which ranks listen there."""
    interface: str | None = None
    """That has this address."""
    taken: Taken | None = None
    """What the library of the ranks' messages takes; None on one node, or where none of this was found out."""
    unreached_messages: Mapping[str, str] = field(default_factory=dict)
    """Why another node's address of that library cannot be reached, by its name."""
    problem: str | None = None
    """Why its ranks could not meet others."""
    unreached: Mapping[str, str]
    """Why another node cannot be reached, by its name."""
    ranks: tuple[RankFindings, ...] = ()


def read_findings(run: RunDir) -> tuple[NodeFindings, ...]:
    """Reads the findings of the nodes that have written anything, by node rank.

    Raises:
        RunFolderError: a file is not what it should be.
    """
    plan = run.read_plan()
    contents = ((node, run.read_json(run.doctor_node(node.name))) for node in plan.nodes)
    return tuple(_node(run, node, content) for node, content in contents if content is not None)


def _node(run: RunDir, node: Node, content: Mapping[str, Any]) -> NodeFindings:
    codes = content.get("exit_codes", {})
    contents = ((rank, run.read_json(run.doctor_rank(rank))) for rank in node.ranks)
    return NodeFindings(
        name=node.name,
        group=node.group,
        wanted=len(node.ranks),
        host=content["host"],
        python=content["python"],
        cpus=content["cpus"],
        files={
            path: found["bytes"] if "bytes" in found else found["error"] for path, found in content["files"].items()
        },
        maps={
            prefix: Path(found["folder"]) if "folder" in found else found["error"]
            for prefix, found in content["maps"].items()
        },
        disk=content["disk"],
        shared_memory=content["shared_memory"],
        address=content["address"][0] if "address" in content else None,
        interface=content.get("interface"),
        taken=Taken(**content["taken"]) if "taken" in content else None,
        unreached_messages=content.get("unreached_messages", {}),
        problem=content.get("problem"),
        unreached=content.get("unreached", {}),
        ranks=tuple(_rank(rank, found, codes.get(str(rank))) for rank, found in contents if found is not None),
    )


def _rank(rank: int, content: Mapping[str, Any], exit_code: int | None) -> RankFindings:
    plain = ("stage", "torch", "nccl", "engine", "no_engine", "failed", "symptom", "hindrance", "all_reduce_ms")
    return RankFindings(
        rank=rank,
        exit_code=exit_code,
        gpus=tuple(content.get("gpus", ())),
        memory=_pair(content.get("memory")),
        clock=_pair(content.get("clock")),
        links=tuple(_link(rank, link) for link in content.get("links", ())),
        **{key: content[key] for key in plain if key in content},
    )


def _link(rank: int, content: Mapping[str, Any]) -> Link:
    return Link(
        first=rank,
        second=content["to"],
        latency_us=content["latency_us"],
        gbit_per_s=(content["gbit_per_s"], content["gbit_per_s_back"]),
    )


def _pair(numbers: Any) -> tuple[int, int] | None:
    return None if numbers is None else (int(numbers[0]), int(numbers[1]))
