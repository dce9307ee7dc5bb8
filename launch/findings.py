"""All that `tdpp status` tells of a run: the verdict, and what else its nodes' files say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from conf.rundir import RunDir
from launch.agent_logs import agent_logs
from launch.complaints import Complaint, complaints, warnings
from launch.mismatches import mismatches
from launch.observe import Node, Observation, observe
from launch.verdict import Verdict, decide

STDERR_BYTES = 128 * 1024
"""Of each node's stderr, its end."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run at one moment, judged."""

    run: RunDir
    seen: Observation
    verdict: Verdict
    mismatches: tuple[str, ...] = ()
    """Where nodes run something else than was submitted."""
    stderr: tuple[Complaint, ...] = ()
    agents: tuple[Complaint, ...] = ()
    """What agents printed that are gone without a result, or what kept them from starting."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.seen.over


def findings(run: RunDir, seen: Observation) -> Findings:
    """Raises RunFolderError if a file of the run is not what it should be."""
    told = {node.name: _end(run.node_err(node.name), node.err_begin) for node in by_failure(seen)}
    return Findings(
        run=run,
        seen=seen,
        verdict=decide(seen),
        mismatches=tuple(mismatches(run, seen.plan, seen.nodes)),
        stderr=tuple(complaints(told, *_messages(seen))),
        agents=tuple(_of_lost_agents(run, seen)),
    )


@dataclass(frozen=True, kw_only=True)
class AllFindings(Findings):
    """With what only a page has room for."""

    warnings: tuple[Complaint, ...]


def all_findings(run: RunDir) -> AllFindings:
    """Raises RunFolderError if a file of the run is not what it should be."""
    found = findings(run, observe(run))
    told = {node.name: _end(run.node_err(node.name), node.err_begin) for node in found.seen.nodes}
    return AllFindings(**vars(found), warnings=tuple(warnings(told)))


def by_failure(seen: Observation) -> list[Node]:
    """The nodes, those first that failed first by themselves."""
    failed: dict[str, float] = {}
    for error in seen.errors:
        if not error.symptom:
            failed.setdefault(error.node, error.unix)
    for node in seen.nodes:
        if node.ended and node.exit_code and not node.stopped:
            failed.setdefault(node.name, node.seen_unix)
    return sorted(seen.nodes, key=lambda node: failed.get(node.name, float("inf")))


def _messages(seen: Observation) -> tuple[list[str], list[str]]:
    """First lines of what ranks told: causes, and symptoms."""

    def first_lines(symptom: bool) -> list[str]:
        return [error.message.strip().split("\n")[0] for error in seen.errors if error.symptom is symptom]

    return first_lines(False), first_lines(True)


def _of_lost_agents(run: RunDir, seen: Observation) -> list[Complaint]:
    lost = {node.name for node in seen.nodes if not node.ended and not node.alive}
    if not lost:
        return []
    jobs = run.read_json(run.jobs)["jobs"]
    its_jobs = {f"job {job.id}" for job in seen.jobs if lost & set(job.nodes)}
    logs = agent_logs(run, seen.plan, jobs)
    return complaints(
        {source: b"".join(map(_end, paths)) for source, paths in logs.items() if source in lost | its_jobs}
    )


def _end(path: Path, begin: int = 0) -> bytes:
    """Of a file from `begin` its end, in whole lines; nothing while there is none."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) - STDERR_BYTES
            file.seek(max(begin, start))
            content = file.read()
    except FileNotFoundError:
        return b""
    return content.partition(b"\n")[2] if start > begin else content
