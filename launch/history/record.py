"""What a run says of the machines that it ran on: `history.json` in its folder, written once it is over."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.errors import RunFolderError
from conf.run_folder import gpu_lines
from conf.run_folder.json_values import Count, Unix, typed
from conf.run_folder.rundir import RunDir
from launch.files.locks import owner_of
from launch.files.records import RestartRecord, Submitted
from launch.files.run_files import Faults
from launch.history.last_events import LastEvents, last_events, round_trip_ms
from launch.judge.causes import causes
from launch.judge.state import State
from launch.judge.verdict import Verdict
from launch.observe.observation import Observation, RunKind, SeenNode
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Node

VERSION = 1
GPU_TAIL_BYTES = 1 << 20
OF_A_HOST = {"node-failed", "agent-lost", "worker-killed", "disk-full", "read-only", "runs-dir-unseen", "gpu-lost"}
"""Rules by which a run fails because of the machine."""
_OF_A_GPU = re.compile(
    r"CUDA error: (?!device-side assert|out of memory|invalid|an illegal)|\bECC\b|\bXid\b|uncorrect|NVML|"
    r"GPU is lost|^was killed by|rank \d+.* was killed by|SIGBUS|unspecified launch failure|hardware|"
    r"NCCL.*(?:unhandled system|unhandled cuda|internal) error",
    re.IGNORECASE,
)
"""In the words of a rank's failure, what the program did not do."""


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """A node of the run, as the machine that it was."""

    host: str
    node: str = ""
    gpu: str
    """The kind of GPU by the plan."""
    uuids: tuple[str, ...] = ()
    """The GPUs themselves, where they were read."""
    driver: str | None = None
    """Version of the GPUs' driver."""
    rank_hours: float = 0.0
    work: dict[str, float] = field(default_factory=dict)
    """Milliseconds that its slowest rank computes for a micro-batch, by what is computed (`work_key`): values of one
    key compare between hosts and runs."""
    links: dict[str, float] = field(default_factory=dict)
    """Milliseconds that a message of the plan takes to a host with the next stage, and its gradient back, by `link_key`
    and that host's name, with a space between."""
    readings: Count = 0
    """Readings of its GPUs, as far as they are read here."""
    throttled: dict[str, int] = field(default_factory=dict)
    """Readings in which a GPU was slowed down, by the reason."""
    troubles: tuple[str, ...] = ()
    """Faults of its GPUs, in words."""
    rule: str = ""
    """The rule by which the run failed, where that began here."""
    reason: str = ""

    @property
    def failed_itself(self) -> bool:
        """Whether the run failed by something that no program does."""
        return self.rule in OF_A_HOST or (bool(_OF_A_GPU.search(self.reason)) and bool(self.rule))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """history.json."""

    version: Count = VERSION
    run: str
    state: State
    began_unix: Unix
    ended_unix: Unix
    waited_s: float | None = None
    """From the submission until all nodes had begun, where nothing was started again."""
    expected_wait_s: float | None = None
    """The same by Slurm's estimate before the submission."""
    hosts: tuple[HostRecord, ...]


def file_of(run: RunDir) -> Path:
    return run.path / "history.json"


def record_of(run: RunDir, seen: Observation, verdict: Verdict) -> RunRecord:
    """The record of a run that is over. A rehearsal ran on no machine."""
    nodes = [] if seen.kind is RunKind.rehearsal else [node for node in seen.nodes if node.host is not None]
    starts = [node.started_unix for node in nodes if node.started_unix is not None]
    began = min(starts, default=seen.launched_unix)
    first = next(iter(causes(seen)), None) if verdict.state in (State.failed, State.lost) else None
    submitted = run.read(run.jobs, Submitted)
    waited = expected = None
    if submitted is not None and submitted.submitted_unix and seen.start == submitted.first and starts:
        waited = max(0.0, max(starts) - submitted.submitted_unix)
        if submitted.expected_unix is not None:
            expected = max(0.0, submitted.expected_unix - submitted.submitted_unix)
    last = _last_events(run, seen.plan, nodes)
    links = _links(seen.plan, {node.name: node.host or node.name for node in nodes}, last)
    hosts = [
        replace(host, rule=first.rule, reason=first.reason) if first and first.node == host.node else host
        for host in (_host(run, seen.plan, node, last, links.get(node.name, {})) for node in nodes)
    ]
    found = []
    for path in sorted(run.path.glob("restart-*.json")):
        with suppress(OSError, RunFolderError):
            found.append(typed(RestartRecord, run.read_json(path), str(path)))
    return RunRecord(
        waited_s=waited,
        expected_wait_s=expected,
        run=run.name,
        state=verdict.state,
        began_unix=began,
        ended_unix=max([began, *(node.seen_unix for node in nodes)]),
        hosts=tuple(_with_lost(hosts, found)),
    )


def _with_lost(hosts: Sequence[HostRecord], restarts: Sequence[RestartRecord]) -> list[HostRecord]:
    """The hosts with those that an earlier start lost: Slurm went on without them, or with them once they were back.

    One that is no longer of the run has the kind of GPU of the host with the likest name.
    """
    found = {host.host: host for host in hosts}
    for restart in restarts if hosts else ():
        for name in restart.hosts:
            like = max(hosts, key=lambda one: len(os.path.commonprefix([one.host, name])))  # noqa: RUF071  (names)
            known = found.get(name, HostRecord(host=name, gpu=like.gpu))
            if not known.rule:
                found[name] = replace(known, rule="node-failed", reason=restart.reason)
    return [*found.values()]


def write(run: RunDir, record: RunRecord) -> None:
    """Keeps a record, where this user owns the run and can write there."""
    if owner_of(run) == os.geteuid():
        with suppress(OSError):
            run.write_json(file_of(run), as_json(record))


def as_json(record: RunRecord) -> dict[str, Any]:
    """What `parse` reads again; what is nothing of a host is left out, for there may be ten thousand records."""
    content = asdict(record)
    return {**content, "hosts": [{name: value for name, value in host.items() if value} for host in content["hosts"]]}


def parse(content: object, where: str) -> RunRecord:
    """Raises RunFolderError for what is no record of this version."""
    return typed(RunRecord, content, where)


def _last_events(run: RunDir, plan: Plan, nodes: Sequence[SeenNode]) -> dict[int, LastEvents]:
    """Returns them by rank, without those whose file is cut off or damaged."""
    names, found = {node.name for node in nodes}, {}
    for rank in (rank for node in plan.nodes if node.name in names for rank in node.ranks):
        with suppress(OSError, RunFolderError, ValueError, struct.error):
            found[rank] = last_events(run.path / "events" / f"rank-{rank:05d}.bin")
    return found


def _links(plan: Plan, hosts: Mapping[str, str], last: Mapping[int, LastEvents]) -> dict[str, dict[str, float]]:
    """`HostRecord.links` by node: of all ranks of a node that send to one of another host, the slowest."""
    found: dict[str, dict[str, float]] = {}
    if plan.island_plans is not None:
        return found
    for rank, own in last.items():
        for peer in own.peers:
            if peer not in last or plan.ranks[peer].stage != plan.ranks[rank].stage + 1:
                continue
            ends = plan.nodes[plan.ranks[rank].node], plan.nodes[plan.ranks[peer].node]
            if hosts[ends[0].name] == hosts[ends[1].name]:
                continue
            if (took := round_trip_ms(own, last[peer], (rank, peer))) is not None:
                key = f"{link_key(plan, plan.ranks[rank].stage, ends)} {hosts[ends[1].name]}"
                of = found.setdefault(ends[0].name, {})
                of[key] = round(max(took, of.get(key, 0.0)), 4)
    return found


def _host(
    run: RunDir, plan: Plan, node: SeenNode, last: Mapping[int, LastEvents], links: dict[str, float]
) -> HostRecord:
    hours = 0.0 if node.started_unix is None else max(0.0, node.seen_unix - node.started_unix) / 3600
    placed = next(one for one in plan.nodes if one.name == node.name)
    work: dict[str, float] = {}
    for rank in placed.ranks:
        if rank in last and (took := last[rank].ms_per_micro_batch) is not None:
            place = plan.ranks[rank]
            key = work_key(plan.of_island(place), place.stage, placed.gpu)
            work[key] = round(max(took, work.get(key, 0.0)), 4)
    entries = gpu_lines.entries(Faults().tail(run.node_gpu(node.name), GPU_TAIL_BYTES).decode(errors="replace"))
    readings = [entry for entry in entries if isinstance(entry, gpu_lines.GpuReading)]
    throttled: dict[str, int] = {}
    for reading in readings:
        for reason in {reason for gpu_of in reading.gpus for reason in gpu_of.throttled}:
            throttled[reason] = throttled.get(reason, 0) + 1
    faults = [gpu_of.fault for reading in readings for gpu_of in reading.gpus if gpu_of.fault is not None]
    faults += [entry.text for entry in entries if isinstance(entry, gpu_lines.GpuTrouble)]
    return HostRecord(
        host=node.host or node.name,
        node=node.name,
        gpu=placed.gpu,
        uuids=tuple(gpu_of.uuid for gpu_of in readings[-1].gpus) if readings else (),
        driver=driver_of(run, node.name),
        rank_hours=round(hours * len(placed.ranks), 4),
        work=work,
        links=links,
        readings=len(readings),
        throttled=throttled,
        troubles=tuple(dict.fromkeys(faults)),
    )


def work_key(plan: Plan, stage: int, gpu: str) -> str:
    """What a rank of a stage computes for a micro-batch: equal for ranks whose times compare."""
    train = plan.train
    return _digest(
        {
            "model": [plan.model.identity(), plan.model.code_digest],
            "layers": plan.partition[stage :: plan.pipeline],
            "ends": [stage == 0, stage == plan.pipeline - 1],
            "tensor": _tensor(plan, stage),
            "sequence_parallel": plan.sequence_parallel,
            "samples": plan.micro_batch_size,
            "precision": str(train.precision),
            "compile": train.compile,
            "recompute": plan.recompute,
            "streams": plan.streams,
            "gpu": gpu,
        }
    )


def link_key(plan: Plan, stage: int, ends: tuple[Node, Node]) -> str:
    """What is sent from a stage to the next one, and from how many ranks of what nodes to what nodes: equal for links
    whose times compare."""
    return _digest(
        {
            "model": [plan.model.identity(), plan.model.code_digest],
            "cuts": [plan.partition[: at + 1] for at in range(stage, len(plan.partition), plan.pipeline)],
            "tensor": [_tensor(plan, stage), _tensor(plan, stage + 1)],
            "parts": [plan.scattered_cuts, plan.compress, plan.sequence_parallel],
            "samples": plan.micro_batch_size,
            "precision": str(plan.train.precision),
            "ends": [[node.group, node.gpu, len(node.ranks)] for node in ends],
        }
    )


def _tensor(plan: Plan, stage: int) -> int:
    return plan.tensor if plan.tensors is None else plan.tensors[stage]


def _digest(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def driver_of(run: RunDir, node: str) -> str | None:
    """The version of the GPUs' driver that a node noted."""
    with suppress(OSError, RunFolderError):
        found = run.read_json(run.node_machine(node))
        driver = found.get("driver") if isinstance(found, dict) else None
        return driver if isinstance(driver, str) else None
    return None
