"""What is to be thought of a run: a state, the rule that led to it, a reason, the evidence.

`decide` looks at an `Observation` only. Its rules, in this order: a cause of failure (a rank's own error, a worker
that died, a lost agent or job), the earliest first; stopped by request; saved because time ran out; ended from
outside; a node that gave up; errors whose cause nobody recorded; a loss that is not finite; success, which takes both
the exit codes and the last iteration in the log; a Slurm that does not answer where only it could tell; GPUs that tell
of a hang; pace.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from conf.rundir import RunDir
from launch import gpu_health
from launch.observe import Job, Node, Observation, RankError, observe
from launch.peers import SILENCE_S
from launch.plan_line import plan_line
from launch.start import Start
from launch.worker import SAVED

STALL_LINES = 5
"""A run stalls when no line came for as long as this many usually take, and at least for `STALL_S`."""
STALL_S = 30.0
FULL_BYTES = 64 * 1024
"""A disk with less room than this counts as full."""


class State(StrEnum):
    starting = "starting"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    stopped = "stopped"
    lost = "lost"
    stalled = "stalled"
    incomplete = "incomplete"
    not_finite = "not finite"
    interrupted = "interrupted"
    hung = "hung"
    unknown = "unknown"


EXIT_CODES = {
    State.starting: 0,
    State.running: 0,
    State.succeeded: 0,
    State.failed: 1,
    State.stopped: 3,
    State.lost: 4,
    State.stalled: 5,
    State.incomplete: 6,
    State.not_finite: 7,
    State.interrupted: 8,
    State.hung: 9,
    State.unknown: 1,
}
"""docs/exit-codes.md explains them. 2 is a wrong command line, 130 an interrupted launcher."""


@dataclass(frozen=True)
class Verdict:
    """The judgement, and what it rests on, line by line."""

    state: State
    rule: str
    reason: str
    evidence: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def judge(run: RunDir, now: float | None = None) -> Verdict:
    """Looks at a run and decides. `now` is in seconds since 1970.

    Raises:
        RunFolderError: a file of the run is not what it should be.
    """
    return decide(observe(run, now))


def decide(seen: Observation) -> Verdict:
    state, rule, reason = next(
        finding
        for rule in (
            _failure,
            _stop,
            _interrupted,
            _ended_from_outside,
            _gave_up,
            _symptoms,
            _not_finite,
            _success,
            _unknown,
            _hung,
            _pace,
            _progress,
        )
        if (finding := rule(seen)) is not None
    )
    return Verdict(state, rule, reason, tuple(_evidence(seen)))


Finding = tuple[State, str, str]


@dataclass(frozen=True)
class Cause:
    """Something that can have brought a run down by itself."""

    unix: float
    finding: Finding


def _failure(seen: Observation) -> Finding | None:
    causes = _causes(seen)
    return causes[0].finding if causes else None


def _causes(seen: Observation) -> list[Cause]:
    """By time; nothing that followed a request to stop is one."""
    told_to_end = {node.name for node in seen.nodes if node.stopped}
    found = [
        Cause(error.unix, (State.failed, "rank-failed", f"{_place(error)} {_what(error)}"))
        for error in seen.errors
        if not error.symptom and not (_ended_by_sigterm(error) and error.node in told_to_end)
    ]
    told_of = {error.node for error in seen.errors}
    for node in seen.nodes:
        finding = _node_failure(node, seen.job_of(node), node.name in told_of)
        if finding is not None and not node.ended and _disk_is_full(seen):
            finding = State.failed, "disk-full", f"{_FULL_DISK}, and so {finding[2]}"
        if finding is not None and (node.ended or seen.stop_unix is None):  # a stop may kill agents
            found.append(Cause(node.seen_unix, finding))
    until = math.inf if seen.stop_unix is None else seen.stop_unix
    return sorted((cause for cause in found if cause.unix <= until), key=lambda cause: cause.unix)


def _ended_by_sigterm(error: RankError) -> bool:
    """Slurm sends it to every process of a job that it ends; a rank may get it before its agent does."""
    return error.type == "Killed" and error.message.startswith("killed by SIGTERM")


_JOB_RULES = {
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node-failed",
    "BOOT_FAIL": "node-failed",
    "OUT_OF_MEMORY": "out-of-memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
}
"""By Slurm's state of a job that took a node with it."""


_FULL_DISK = "the disk of the run folder is full"


def _disk_is_full(seen: Observation) -> bool:
    """Nothing that fails for this can write why."""
    return seen.free_bytes < FULL_BYTES


def _node_failure(node: Node, job: Job | None, ranks_told: bool) -> Finding | None:
    """What went wrong with a node itself. If its ranks told of errors, a plain exit code follows from them."""
    if node.ended:
        if node.stopped or node.reason or not node.exit_code:
            return None
        if node.reason:
            return State.failed, "node-gave-up", f"node {node.name} {node.reason}"
        if node.exit_code < 0:
            name = _signal(-node.exit_code)
            return State.failed, "worker-killed", f"the worker of node {node.name} was killed by {name}"
        if ranks_told:
            return None
        reason = f"the worker of node {node.name} ended with {node.exit_code}: see nodes/{node.name}.err"
        return State.failed, "worker-failed", reason
    if node.alive:
        return None
    if job is not None and job.state is not None:
        when = "before it had started" if node.state == "absent" else "and left no result"
        return State.failed, _JOB_RULES.get(job.state.state, "job-ended"), f"node {node.name} is gone, {when}: {job}"
    if node.state == "absent":
        return State.lost, "never-started", f"node {node.name} was never started, and nothing is left to start it"
    return State.lost, "agent-lost", f"the agent of node {node.name} (process {node.pid}) is gone and left no result"


def _stop(seen: Observation) -> Finding | None:
    if seen.stop_unix is None or _has_finished(seen):
        return None
    if not seen.over:
        return State.running, "stopping", "asked to stop, and on its way out"
    return State.stopped, "stopped", "ended on request"


def _interrupted(seen: Observation) -> Finding | None:
    """The ranks saved because a signal told that time was running out, and nobody starts them again."""
    saved = [node for node in seen.nodes if node.ended and node.exit_code == SAVED]
    if not saved or not seen.over:
        return None
    why = next((f", and {node.reason}" for node in saved if node.reason), "")
    reason = f"time ran out{why}; {_saved(seen)}; 'tdpp launch resume={_name(seen)}' goes on from there"
    return State.interrupted, "time-limit", reason


def _gave_up(seen: Observation) -> Finding | None:
    """Nodes that ended because of others; those have no cause to show, or they would have been told of before."""
    reasons = [node for node in seen.nodes if node.ended and node.exit_code and node.reason]
    if not reasons or not seen.over or seen.stop_unix is not None:
        return None
    first = min(reasons, key=lambda node: node.seen_unix)
    return State.failed, "node-gave-up", f"node {first.name} {first.reason}"


def _ended_from_outside(seen: Observation) -> Finding | None:
    """Every node that ended badly was told to; were one not, the others would only have followed it."""
    bad = [node for node in seen.nodes if node.ended and node.exit_code]
    told = [node for node in bad if node.reason is None]  # the others followed these
    if not told or not seen.over or not all(node.stopped for node in bad):
        return None
    first = min(told, key=lambda node: node.seen_unix)
    if first.stopped == signal.SIGUSR2.name:
        key = "cluster.groups.<group>.time_min" if seen.jobs else "executor.time_min"
        return State.failed, "time-limit", f"the time limit was reached before anything was saved; give {key} more"
    job = seen.job_of(first)
    if job is not None and job.over:
        rule = _JOB_RULES.get(job.state.state, "ended-from-outside") if job.state else "ended-from-outside"
        return State.failed, rule, f"node {first.name} was ended by {first.stopped} from outside: {job}"
    reason = (
        f"node {first.name} was ended by {first.stopped} from outside: by somebody, or because its parent process died"
    )
    return State.failed, "ended-from-outside", reason


def _symptoms(seen: Observation) -> Finding | None:
    """Ranks that lost others, and nobody knows why."""
    if not seen.errors or seen.stop_unix is not None:
        return None
    first = seen.errors[0]
    return State.failed, "rank-lost-another", f"{_place(first)} {_what(first)}; no rank recorded the cause"


def _not_finite(seen: Observation) -> Finding | None:
    if not seen.log:
        return None
    last = seen.log[-1]
    if (last.loss is None or math.isfinite(last.loss)) and not last.nan:
        return None
    return State.not_finite, "loss-not-finite", f"the loss of iteration {last.iteration} is {last.loss}"


def _success(seen: Observation) -> Finding | None:
    if not all(node.ended and node.exit_code == 0 for node in seen.nodes):
        return None
    if _has_finished(seen):
        reason = f"{_ranks(seen)} ended well, and iteration {seen.iterations} of {seen.iterations} is in the log"
        return State.succeeded, "finished", reason
    last = seen.log[-1].iteration if seen.log else 0
    reason = f"all ranks ended with 0, but the log ends at iteration {last} of {seen.iterations}"
    return State.incomplete, "iterations-missing", reason


def _has_finished(seen: Observation) -> bool:
    well = all(node.ended and node.exit_code == 0 for node in seen.nodes)
    return well and bool(seen.log) and seen.log[-1].iteration == seen.iterations


def _unknown(seen: Observation) -> Finding | None:
    """Slurm does not answer, and a node's own file does not tell how it is."""
    if seen.silence is None:
        return None
    for node in seen.nodes:
        silent_s = seen.now_unix - node.seen_unix
        if node.state == "absent":
            told = "has not told anything yet"
        elif node.ended and node.stopped and not node.reason:
            told = f"was ended by {node.stopped} from outside, and may be started again"
        elif not node.ended and silent_s > SILENCE_S:
            told = f"gave its last sign of life {_ago(silent_s)}"
        else:
            continue
        return State.unknown, "slurm-silent", f"node {node.name} {told}, and Slurm does not answer: {seen.silence}"
    return None


def _hung(seen: Observation) -> Finding | None:
    """Only of a run all of whose nodes are at work: ranks that wait for others to start do not hang."""
    if (seen.log and not _is_late(seen)) or len(seen.gpus) < len(seen.nodes):
        return None
    found = gpu_health.hang(seen.gpus, seen.now_unix, seen.log[-1].unix if seen.log else None)
    return None if found is None else (State.hung, *found)


def _pace(seen: Observation) -> Finding | None:
    if not _is_late(seen):
        return None
    age = seen.now_unix - max(seen.log[-1].unix, _began(seen))
    since = " since the run was started again" if _began(seen) > seen.log[-1].unix else ""
    reason = f"no iteration was logged for {age:.0f} s{since}; usually one line takes {_usual_s(seen):.1f} s"
    return State.stalled, "no-progress", reason


def _is_late(seen: Observation) -> bool:
    """Whether the next line of the log has not come for far longer than usual.

    The lines of an earlier start tell nothing of how long a run is silent that was started again; and before its
    first own line it imports torch, reads the checkpoint, and its ranks meet.
    """
    if not seen.log or seen.log[-1].iteration == seen.iterations:
        return False
    last, began = seen.log[-1].unix, _began(seen)
    patience = max(STALL_S, STALL_LINES * _usual_s(seen), gpu_health.GRACE_S if began > last else 0)
    return seen.now_unix - max(last, began) >= patience


def _began(seen: Observation) -> float:
    """When the last of the nodes joined this start; 0 while none has."""
    return max((node.started_unix or 0.0 for node in seen.nodes), default=0.0)


def _usual_s(seen: Observation) -> float:
    """From one line of the log to the next."""
    return median_ms(seen) / 1e3 * int(seen.plan["train"]["log_interval"])


def _progress(seen: Observation) -> Finding:
    if any(node.state == "running" for node in seen.nodes):
        return State.running, "running", f"{_ranks(seen)} at work"
    waiting = ", ".join(str(job) for job in seen.jobs if job.state and job.state.pending)
    if seen.start.restarts:
        where = f": {waiting}" if waiting else ""
        reason = f"to be started again (restart {seen.start.restarts}){where}; {_saved(seen)}"
        return State.starting, "restarting", reason
    preparing = next((node for node in seen.nodes if node.alive and node.doing), None)
    if preparing is not None:
        reason = f"node {preparing.name} makes its container ready, waiting for {preparing.doing}"
        return State.starting, "preparing", reason
    return State.starting, "starting", waiting or "waiting for its nodes to start"


def _saved(seen: Observation) -> str:
    return "nothing was saved" if seen.saved is None else f"saved after iteration {seen.saved}"


def _name(seen: Observation) -> str:
    return str(seen.plan["run"])


def median_ms(seen: Observation) -> float:
    """Milliseconds per iteration, the median of the logged lines; the first, which warms up, only if it is alone."""
    lines = seen.log[1:] or seen.log
    return statistics.median(line.elapsed_ms for line in lines)


def _evidence(seen: Observation) -> Iterator[str]:
    yield f"plan: {plan_line(seen.plan)}"
    if seen.silence is not None:
        yield f"what Slurm would tell is missing: {seen.silence}"
    for job in seen.jobs:
        left = f", {job.state.time_left} left" if job.state and job.state.state == "RUNNING" else ""
        yield f"{job}{left}: {', '.join(job.nodes)}"
    if seen.start > Start(0, 0):
        yield f"start {seen.start} (submission.restart); {_saved(seen)}"
    if seen.log:
        last = seen.log[-1]
        yield (
            f"iteration: {last.iteration} of {seen.iterations}, {_loss(seen)}, {median_ms(seen):.1f} ms per "
            f"iteration (median), logged {_ago(seen.now_unix - last.unix)}"
        )
    else:
        yield f"iteration: none of {seen.iterations} logged yet"
    for node in seen.nodes:
        if node.ended:
            told = f", told to end by {node.stopped}" if node.stopped else ""
            told += f": it {_first_line(node.reason)}" if node.reason else ""
            yield f"node {node.name}: ended with {node.exit_code}{told}"
        else:
            sign = "" if node.alive else ", but no process of it lives"
            state = "not started" if node.state == "absent" else node.state
            state += f", waiting for {node.doing}" if node.doing else ""
            yield f"node {node.name}: {state}{sign}"
    for node_gpus in seen.gpus:
        line = gpu_health.evidence(node_gpus, seen.now_unix)
        if line is not None:
            yield line
    for cause in _causes(seen)[1:]:
        yield f"later: {_first_line(cause.finding[2])}"
    if _disk_is_full(seen):
        yield f"{_FULL_DISK}: {seen.free_bytes} bytes are free"
    symptoms = sum(error.symptom for error in seen.errors)
    if symptoms:
        yield f"{symptoms} rank{'s' * (symptoms > 1)} failed only because another one was lost"


def _loss(seen: Observation) -> str:
    loss = seen.log[-1].loss
    if loss is not None:
        return f"loss {loss:.4f}"
    return "rehearsed, so without a loss" if seen.plan["rehearsal"] else "all skipped"


def _ranks(seen: Observation) -> str:
    count = len(seen.plan["ranks"])
    return f"{count} rank{'s' * (count > 1)}"


def _place(error: RankError) -> str:
    return f"rank {error.rank} (stage {error.stage}, dp {error.dp}, tp {error.tp}, node {error.node})"


def _what(error: RankError) -> str:
    if error.type == "Killed":
        return f"was {error.message}"
    return f"failed with {error.type}: {_first_line(error.message)}"


def _first_line(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return f"{first}{' …' if more else ''}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
