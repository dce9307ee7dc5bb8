"""What can have brought a run down by itself: a rank's own error, a worker that died, a node or job that was lost."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conf.visible import numbered, shortened
from launch.judge.evidence import FULL_DISK, disk_is_full
from launch.observe.observation import Observation, SeenNode
from launch.screen import one_line
from megatron_ext.contract.errors import RankFailure

LOST = frozenset({"launch-cut-off", "never-started", "agent-lost"})
"""Rules by which a run is lost; by all others it has failed."""
JOB_RULES = {
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node-failed",
    "BOOT_FAIL": "node-failed",
    "OUT_OF_MEMORY": "out-of-memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
}
"""The rule for each of Slurm's states of a job that took a node with it."""
_ENDING = ("killed by SIGTERM", "killed by SIGKILL")
"""To every process of a job that it ends Slurm sends SIGTERM, and after its KillWait SIGKILL; to those on a node that
was set down SIGKILL at once."""
_ENDED_BY = (signal.SIGTERM.name, signal.SIGINT.name)
_SPREAD_S = 2.0
"""A signal to all processes of a node reaches its agent and its ranks in any order, so far apart on a busy machine."""


_WRITABLE_AGAIN = (
    "mount its file system writable again (dmesg or its administrator says why it is not), and then continue with "
    "'tdpp launch resume=RUN'"
)


@dataclass(frozen=True)
class Cause:
    """When something went wrong, by which rule, and in words."""

    unix: float
    rule: str
    reason: str
    node: str
    what: str
    """The reason without the name of the rank or node, where that is its subject."""
    ranks: tuple[int, ...] = ()
    """That failed so; none where the node itself is meant."""


def causes(seen: Observation) -> list[Cause]:
    """Lists causes by time; what followed from the end of a node or of a job, or from a request to stop, is none."""
    until = math.inf if seen.stop_unix is None else seen.stop_unix
    found = list(_rank_failures(seen, until))
    told_of = {error.node for error in seen.errors}
    for node in seen.nodes:
        failure = _node_failure(node, seen, node.name in told_of)
        if failure is None or not (node.ended or seen.stop_unix is None):  # a stop may kill agents
            continue
        rule, reason = failure
        if not node.ended and disk_is_full(seen):
            rule, reason = "disk-full", f"{FULL_DISK}; {reason}"
        elif not node.ended and seen.read_only:
            rule, reason = "read-only", f"{seen.plan.folder} has become read-only: {reason}; {_WRITABLE_AGAIN}"
        found.append(Cause(node.seen_unix, rule, reason, node.name, reason.removeprefix(f"node {node.name} ")))
    return sorted((cause for cause in found if cause.unix <= until), key=lambda cause: cause.unix)


def _rank_failures(seen: Observation, until: float) -> Iterator[Cause]:
    """What several ranks say in the same words is one cause: that of the first of them, with the others' numbers."""
    alike: dict[tuple[str, str], list[RankFailure]] = {}
    for error in seen.errors:
        if error.unix <= until and not error.symptom and _ended_with_its_node(error, seen) is False:
            alike.setdefault(_rank_failure(error, seen), []).append(error)
    for (rule, words), (first, *others) in alike.items():
        ranks = tuple(error.rank for error in (first, *others))
        also = _also(others, len(seen.plan.ranks))
        yield Cause(first.unix, rule, f"{first.place} {words}{also}", first.node, words, ranks)


def _also(others: Sequence[RankFailure], of: int) -> str:
    if not others:
        return ""
    if len(others) > 1 and len(others) == of - 1:
        return f" (also all {len(others)} other ranks)"
    return f" (also {numbered('rank', [error.rank for error in others])})"


def _rank_failure(error: RankFailure, seen: Observation) -> tuple[str, str]:
    """Words a rank's failure without its place."""
    node = next(node for node in seen.nodes if node.name == error.node)
    if error.type == "Killed" and not error.message.startswith(_ENDING):
        return _with_memory("rank-failed", what(error), node, seen)
    return "rank-failed", what(error)


def _with_memory(rule: str, reason: str, node: SeenNode, seen: Observation) -> tuple[str, str]:
    """A process that gets no memory may end itself in any way; its stderr then says why."""
    if node.no_memory is None:
        return rule, reason
    return "out-of-memory", f"{reason}, out of memory: {node.no_memory} ({_stderr(node, seen)})"


def _stderr(node: SeenNode, seen: Observation) -> str:
    return f"{seen.plan.folder}/nodes/{node.name}.err"


def undecided(seen: Observation) -> list[RankFailure]:
    """Ranks that were killed, by time, of which it is not known yet whether that was the end of their node."""
    return [error for error in seen.errors if not error.symptom and _ended_with_its_node(error, seen) is None]


def _ended_with_its_node(error: RankFailure, seen: Observation) -> bool | None:
    """Whether what ended a rank's whole node killed the rank; None as long as its agent may still say."""
    if error.type != "Killed" or not error.message.startswith(_ENDING):
        return False
    node = next(node for node in seen.nodes if node.name == error.node)
    if not node.ended:
        return None if node.alive else True
    if node.stopped not in _ENDED_BY:
        return False
    spread = _SPREAD_S if node.reason is None else 0.0  # with a reason its agent alone asked it to end
    return node.stopped_unix is None or error.unix >= node.stopped_unix - spread


def _node_failure(node: SeenNode, seen: Observation, ranks_told: bool) -> tuple[str, str] | None:
    """What went wrong with a node itself. If its ranks reported errors, a plain exit code follows from them."""
    if node.ended:
        if node.stopped or node.reason or not node.exit_code:
            return None
        if node.exit_code < 0:
            reason = f"the worker of node {node.name} was killed by {_signal(-node.exit_code)}"
            return _with_memory("worker-killed", reason, node, seen)
        if ranks_told:
            return None
        reason = f"the worker of node {node.name} exited with {node.exit_code}"
        if node.no_memory is None:
            reason += f": {node.error or f'see {_stderr(node, seen)}'}"
        return _with_memory("worker-failed", reason, node, seen)
    if node.unseen is not None:
        return "runs-dir-unseen", f"node {node.name}: {node.unseen.message(seen.runs_dir)}"
    job = seen.job_of(node)
    if node.alive or (job is not None and job.withdrawn and node.state == "absent"):
        return None
    if job is not None and job.state is not None and job.over:
        when = "before it started" if node.state == "absent" else "without a result"
        by_slurm = seen.after is not None and node.state == "absent" and not job.state.detail
        why = f"; the run that it waits for (executor.after={seen.after}) has not succeeded" if by_slurm else ""
        return JOB_RULES.get(job.state.state, "job-ended"), f"node {node.name} is gone {when}: {job}{why}"
    if node.state == "absent" and job is None and seen.cut_off:
        reason = f"node {node.name} was never started: the launch was interrupted before it had submitted everything"
        return "launch-cut-off", reason
    if node.state == "absent":
        return "never-started", f"node {node.name} was never started, and nothing is left that would start it"
    return "agent-lost", f"the agent of node {node.name} (process {node.pid}) is gone and left no result"


def what(error: RankFailure) -> str:
    if error.type == "Killed":
        return f"was {error.message}"
    return f"failed with {error.type}: {shortened(one_line(error.message))}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
