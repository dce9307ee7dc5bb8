"""All that `tdpp status` says of a run: the verdict, and what else its nodes' files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.run_folder.rundir import RunDir
from launch.files.faults import Faults
from launch.files.run_files import read_submitted
from launch.judge.culprit import Culprit, culprit
from launch.judge.mismatches import mismatches
from launch.judge.stderr_lines import LineGroup, grouped_lines, warnings
from launch.judge.verdict import Verdict, decide
from launch.observe.agent_logs import agent_logs
from launch.observe.look import observe
from launch.observe.observation import Node, Observation

STDERR_BYTES = 128 * 1024
"""Of each node's stderr, its end."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run at one moment, judged."""

    run: RunDir
    seen: Observation
    verdict: Verdict
    culprit: Culprit | None = None
    mismatches: tuple[str, ...] = ()
    """Where nodes run something else than was submitted."""
    stderr: tuple[LineGroup, ...] = ()
    agents: tuple[LineGroup, ...] = ()
    """What agents printed that are gone without a result, or what kept them from starting."""
    faults: tuple[str, ...] = ()
    """What of the run's files cannot be read, or is not what it should be."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.seen.over


def findings(run: RunDir, seen: Observation) -> Findings:
    """What else is found out about a run; what of it cannot be read is a fault."""
    faults = Faults(seen.faults)
    stderr = _ends(run, by_failure(seen), faults)
    mismatching = mismatches(run, seen.plan, seen.nodes, faults)
    lost = _of_lost_agents(run, seen, faults)
    verdict = decide(seen)
    return Findings(
        run=run,
        seen=seen,
        verdict=verdict,
        culprit=culprit(run, seen, verdict.state),
        mismatches=tuple(mismatching),
        stderr=tuple(grouped_lines(stderr, *_messages(seen))),
        agents=tuple(lost),
        faults=tuple(fault.text for fault in faults),
    )


@dataclass(frozen=True, kw_only=True)
class AllFindings(Findings):
    """With what only a page has room for."""

    warnings: tuple[LineGroup, ...]


def all_findings(run: RunDir) -> AllFindings:
    """Raises RunFolderError if plan.json or jobs.json is not what it should be."""
    found = findings(run, observe(run))
    stderr = _ends(run, found.seen.nodes, Faults())
    return AllFindings(**vars(found), warnings=tuple(warnings(stderr)))


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
    """First lines of what ranks reported: causes, and symptoms."""

    def first_lines(symptom: bool) -> list[str]:
        return [error.message.strip().split("\n")[0] for error in seen.errors if error.symptom is symptom]

    return first_lines(False), first_lines(True)


def _of_lost_agents(run: RunDir, seen: Observation, faults: Faults) -> list[LineGroup]:
    lost = {node.name for node in seen.nodes if not node.ended and not node.alive}
    if not lost:
        return []
    submitted = read_submitted(run, len(seen.nodes))
    its_jobs = {f"job {job.id}" for job in seen.jobs if lost & set(job.nodes)}
    logs = faults.tried(lambda: agent_logs(run, seen.plan, submitted), {})
    return grouped_lines(
        {
            source: b"".join(faults.tail(path, STDERR_BYTES) for path in paths)
            for source, paths in logs.items()
            if source in lost | its_jobs
        }
    )


def _ends(run: RunDir, nodes: Sequence[Node], faults: Faults) -> dict[str, bytes]:
    return {node.name: faults.tail(run.node_err(node.name), STDERR_BYTES, node.err_begin) for node in nodes}
