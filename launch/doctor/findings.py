"""What megatron_ext.doctor wrote down on the nodes (docs/formats.md), typed, and a line of what `tdpp doctor` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from conf.run_folder.json_values import typed
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


@dataclass(frozen=True)
class Check:
    """One line."""

    level: Level
    where: str
    """`here`, a node group, two of them, or `all nodes`."""
    what: str
    text: str


@dataclass(frozen=True)
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
    return Check(level, where, what, text)


ALONE = "alone"
"""The stage in which a rank needs no other one."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank measured between it and another one."""

    to: int
    latency_us: float
    gbit_per_s: float
    gbit_per_s_back: float


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
class Looked:
    """What a node found at a path: the bytes of a file, or the folder where index maps would be written; or an error,
    why there is neither."""

    bytes: int | None = None
    folder: Path | None = None
    error: str | None = None


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
    files: Mapping[str, Looked]
    """The data and weights, by path."""
    maps: Mapping[str, Looked]
    """The index maps, by the prefix of a corpus."""
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
    unreached: Mapping[str, str] = field(default_factory=dict)
    """Why another node cannot be reached, by its name."""
    ranks: tuple[RankFindings, ...] = ()


def read_findings(run: RunDir) -> tuple[NodeFindings, ...]:
    """Reads the findings of the nodes that have written anything, by node rank. Raises RunFolderError: a file is not
    what it should be."""
    plan = run.read_plan()
    contents = ((node, run.read_json(run.doctor_node(node.name))) for node in plan.nodes)
    return tuple(_node(run, node, content) for node, content in contents if content is not None)


@dataclass(frozen=True, kw_only=True)
class _Note:
    """What a node writes in another form."""

    address: tuple[Any, ...] = ()
    """With its port, of which nothing is said."""
    exit_codes: Mapping[str, int | None] = field(default_factory=dict)
    """Those of the ranks, by their numbers."""


def _node(run: RunDir, node: Node, content: Any) -> NodeFindings:
    where = str(run.doctor_node(node.name))
    note = typed(_Note, content, where)
    known = {"name": node.name, "group": node.group, "wanted": len(node.ranks), "ranks": []}
    found = typed(NodeFindings, {**content, **known, "address": next(iter(note.address), None)}, where)
    ranks = []
    for rank in node.ranks:
        path = run.doctor_rank(rank)
        if (of_rank := run.read_object(path, ())) is not None:
            known = {"rank": rank, "exit_code": note.exit_codes.get(str(rank))}
            ranks.append(typed(RankFindings, {**of_rank, **known}, str(path)))
    return replace(found, ranks=tuple(ranks))
