"""The rules by which a run is judged. They look at an `Observation` only.

In this order: a file that would show how the run is and cannot be read; nodes of an elastic run that make a new plan;
a cause of failure (`launch.judge.causes`), the earliest first; stopped by request; saved because time ran out; ended
from outside; a rank that stood still; a node that gave up; errors whose cause nobody recorded; a loss that is not
finite; saved because its price was reached; success, which takes both the exit codes and the last iteration in the
log; a Slurm that does not answer where only it could know; a worker or agent that was stopped; a failure whose cause
is not known yet; GPUs that show a hang; pace; a rank that was stopped.
"""

from __future__ import annotations

import math
import signal

from conf.visible import plural
from launch.judge import gpu_health
from launch.judge.causes import JOB_RULES, LOST, causes, undecided, what
from launch.judge.evidence import saved, silent_nodes, silent_s
from launch.judge.progress import began_unix, held_up_by, held_up_words, is_late, lost_unix, usual_s
from launch.judge.state import State
from launch.node.elastic.peer_status import REGROUPS
from launch.node.peers import SILENCE_S
from launch.observe.observation import Observation, SeenNode
from launch.screen import ago
from megatron_ext.contract.errors import KILLED
from megatron_ext.contract.goal import MAX_COST, UNTIL
from megatron_ext.contract.worker import SAVED

Finding = tuple[State, str, str]
_SURVIVED = LOST | {*JOB_RULES.values(), "job-ended", "rank-failed", "worker-killed", "out-of-memory"}
"""Rules by which a node or a rank is lost that an elastic run goes on without."""


def _unreadable(seen: Observation) -> Finding | None:
    fault = next((fault for fault in seen.faults if fault.decisive), None)
    return None if fault is None else (State.unknown, "unreadable", fault.text)


def _regroups(seen: Observation) -> Finding | None:
    """An elastic run goes on without what was lost, as long as a node lives and no rank has an error of its own, or
    would have, had its time not run out."""
    if seen.plan.elastic is None or seen.stop_unix is not None:
        return None
    if any(not error.symptom and error.type != KILLED for error in seen.errors):
        return None
    if seen.over:
        return _interrupted(seen)
    found, waiting = causes(seen), [node.name for node in seen.nodes if node.state == REGROUPS]
    if any(cause.rule not in _SURVIVED for cause in found) or not (found or waiting or undecided(seen)):
        return None
    killed = [f"{error.place} {what(error)}" for error in seen.errors if not error.symptom]
    why = next(iter([*killed, *(cause.reason for cause in found)]), f"node {', '.join(waiting)} waits for a new plan")
    return State.starting, "regrouping", f"{why}; its nodes make a new plan; {saved(seen)}"


def _failure(seen: Observation) -> Finding | None:
    """Finds no failure while a rank's death may turn out to be its node's end, and came before the other causes."""
    found = causes(seen)
    if not found or any(error.unix < found[0].unix for error in undecided(seen)):
        return None
    first = found[0]
    return State.lost if first.rule in LOST else State.failed, first.rule, first.reason


def _stop(seen: Observation) -> Finding | None:
    if seen.stop_unix is None or _has_finished(seen):
        return None
    if not seen.over:
        return State.running, "stopping", "asked to stop; its processes are ending"
    way_on = f"; continue with 'tdpp launch resume={_name(seen)}'" if seen.saved is not None else ""
    return State.stopped, "stopped", f"ended on request; {saved(seen)}{way_on}"


def _interrupted(seen: Observation) -> Finding | None:
    """The ranks saved because a signal said that time was running out, and nobody starts them again."""
    ended = [node for node in seen.nodes if node.ended and node.exit_code == SAVED]
    if not ended or not seen.over:
        return None
    why = next((f", and {node.reason}" for node in ended if node.reason), "")
    reason = f"the time limit was reached{why}; {saved(seen)}; continue with 'tdpp launch resume={_name(seen)}'"
    return State.interrupted, "time-limit", reason


def _gave_up(seen: Observation) -> Finding | None:
    """Nodes that ended because of others; those have no cause to show, or they would have been reported before."""
    reasons = [node for node in seen.nodes if node.ended and node.exit_code and node.reason]
    if not reasons or not seen.over or seen.stop_unix is not None:
        return None
    first = min(reasons, key=lambda node: node.seen_unix)
    return State.failed, "node-gave-up", f"node {first.name} {first.reason}"


def _stood_still(seen: Observation) -> Finding | None:
    """Ranks lost others, and one of those had stopped, or did not come back from work of its own."""
    if lost_unix(seen) is None or not seen.over or seen.stop_unix is not None:
        return None
    held = held_up_by(seen)
    return (State.failed, "rank-stood-still", ": ".join(held_up_words(seen, held))) if held else None


def _ended_from_outside(seen: Observation) -> Finding | None:
    """Every node that ended badly was told to; were one not, the others would only have followed it.

    While others still end this is known as soon as Slurm says what became of the job.
    """
    bad = _ended_badly(seen)
    leading = [node for node in bad if node.reason is None]  # the others followed these
    if not leading or not all(node.stopped for node in bad):
        return None
    first = min(leading, key=lambda node: node.seen_unix)
    job = seen.job_of(first)
    if not seen.over and (job is None or job.state is None or not job.over):
        return None
    if first.stopped == signal.SIGUSR2.name:
        key = "cluster.groups.<group>.time_min" if seen.jobs else "executor.time_min"
        return State.failed, "time-limit", f"the time limit was reached before anything was saved; increase {key}"
    if job is not None and job.over:
        rule = JOB_RULES.get(job.state.state, "ended-from-outside") if job.state else "ended-from-outside"
        return State.failed, rule, f"node {first.name} was ended from outside by {first.stopped}: {job}"
    reason = (
        f"node {first.name} was ended from outside by {first.stopped}: somebody ended it, or its parent process died"
    )
    return State.failed, "ended-from-outside", reason


def _ended_badly(seen: Observation) -> list[SeenNode]:
    return [node for node in seen.nodes if node.ended and node.exit_code not in (0, SAVED)]


def _symptoms(seen: Observation) -> Finding | None:
    """Ranks that lost others, and nobody has said why."""
    if not seen.errors or not seen.over or seen.stop_unix is not None:
        return None
    first = seen.errors[0]
    return State.failed, "rank-lost-another", f"{first.place} {what(first)}; no rank recorded the cause"


def _not_finite(seen: Observation) -> Finding | None:
    if not seen.log:
        return None
    last = seen.log[-1]
    if (last.loss is None or math.isfinite(last.loss)) and not last.nan:
        return None
    return State.not_finite, "loss-not-finite", f"the loss of iteration {last.iteration} is {last.loss}"


def _spent(seen: Observation) -> Finding | None:
    """The ranks saved because the nodes had cost what they may."""
    if seen.goal is None or seen.goal.ended_by != MAX_COST:
        return None
    if not all(node.ended and node.exit_code == 0 for node in seen.nodes):
        return None
    reason = (
        f"its nodes have cost ${seen.goal.value:.4g} of train.max_cost={seen.goal.limit}; saved after iteration "
        f"{seen.goal.iteration} of {seen.of_iterations}; to continue, start a new run with "
        f"train.load={seen.plan.folder}"
    )
    return State.interrupted, "max-cost", reason


def _success(seen: Observation) -> Finding | None:
    if not all(node.ended and node.exit_code == 0 for node in seen.nodes):
        return None
    if _has_finished(seen):
        consumed = seen.log[-1].consumed_samples
        terms = "" if consumed is None else seen.plan.train.progress(consumed)
        reason = f"{_ranks(seen)} exited with 0; iteration {seen.iterations} of {seen.iterations} logged"
        reason += f": {terms}" if terms else ""
        if seen.goal is not None and seen.goal.ended_by == UNTIL:
            reason = (
                f"{_ranks(seen)} exited with 0 after iteration {seen.iterations}, which reached "
                f"train.until={seen.goal.limit}: {seen.goal.value:.6g}"
            )
        return State.succeeded, "finished", reason
    last = seen.log[-1].iteration if seen.log else 0
    reason = f"all ranks exited with 0, but the log ends at iteration {last} of {seen.of_iterations}"
    return State.incomplete, "iterations-missing", reason


def _has_finished(seen: Observation) -> bool:
    well = all(node.ended and node.exit_code == 0 for node in seen.nodes)
    return well and bool(seen.log) and seen.log[-1].iteration == seen.iterations


def _unknown(seen: Observation) -> Finding | None:
    """Slurm does not answer, and a node's own file does not say how it is."""
    if seen.silence is None:
        return None
    for node in seen.nodes:
        silent_s = seen.now_unix - node.seen_unix
        if node.state == "absent":
            how = "has not reported yet"
        elif node.ended and node.stopped and not node.reason:
            how = f"was ended from outside by {node.stopped} and may be started again"
        elif not node.ended and silent_s > SILENCE_S:
            how = f"last showed a sign of life {ago(silent_s)}"
        else:
            continue
        return State.unknown, "slurm-silent", f"node {node.name} {how}, and Slurm does not answer: {seen.silence}"
    return None


def _unwatched(seen: Observation) -> Finding | None:
    node = next((node for node in seen.nodes if node.alive and node.halted), None)
    if node is None:
        return None
    reason = (
        f"{node.halted} of node {node.name} was stopped by SIGSTOP or Ctrl-Z, so nothing watches its ranks; "
        "continue it with SIGCONT"
    )
    return State.stalled, "process-stopped", reason


def _failing(seen: Observation) -> Finding | None:
    """Something went wrong, and what did so first is not known before more nodes, or Slurm, have reported."""
    if seen.over or seen.stop_unix is not None:
        return None
    if killed := undecided(seen):
        first = killed[0]
        reason = f"{first.place} {what(first)}; it is not known yet whether its whole node was ended"
        return State.failing, "rank-or-node", reason
    symptoms = [error for error in seen.errors if error.symptom]
    if silent := silent_nodes(seen):
        silence, lost = silent[0]
        others = f" (and of {plural(len(silent) - 1, 'other')})" if len(silent) > 1 else ""
        reason = f"the agent of node {lost.name}{others} has been silent for {silence:.0f} s"
        reason += f"; {symptoms[0].place} {what(symptoms[0])}" if symptoms else ""
        reason += "; it is not known yet whether the node is lost"
        return State.failing, "agent-silent", reason
    if symptoms:
        if held := held_up_by(seen):
            reason = f"{': '.join(held_up_words(seen, held))}; not all nodes have reported yet"
            return State.failing, "rank-stood-still", reason
        reason = f"{symptoms[0].place} {what(symptoms[0])}; the cause is not known yet"
        return State.failing, "rank-lost-another", reason
    bad = _ended_badly(seen)
    if not bad:
        return None
    node = min(bad, key=lambda node: node.seen_unix)
    if node.reason is not None:
        return State.failing, "node-gave-up", f"node {node.name} {node.reason}"
    reason = (
        f"node {node.name} was ended from outside by {node.stopped}; it is not known yet whether it is started again"
    )
    return State.failing, "ended-from-outside", reason


def _hung(seen: Observation) -> Finding | None:
    """Judges only a run all of whose nodes are at work: ranks that wait for others to start do not hang."""
    if (seen.log and not is_late(seen)) or len(seen.gpus) < len(seen.nodes):
        return None
    found = gpu_health.hang(seen.gpus, seen.now_unix, seen.log[-1].unix if seen.log else None)
    return None if found is None else (State.hung, found[0], found[1] + _by_whom(seen))


def _pace(seen: Observation) -> Finding | None:
    if not is_late(seen):
        return None
    age = seen.now_unix - max(seen.log[-1].unix, began_unix(seen))
    since = " since the run was started again" if began_unix(seen) > seen.log[-1].unix else ""
    reason = f"no iteration logged for {age:.0f} s{since}; usually one takes {usual_s(seen):.1f} s"
    return State.stalled, "no-progress", reason + _by_whom(seen)


def _by_whom(seen: Observation) -> str:
    held = held_up_by(seen)
    return f"; {': '.join(held_up_words(seen, held))}" if held else ""


def _halted(seen: Observation) -> Finding | None:
    """Somebody has stopped a rank: also before the log is late, or has begun."""
    held = held_up_by(seen)
    if seen.over or not held or not held[0].stopped:
        return None
    return State.stalled, "process-stopped", ": ".join(held_up_words(seen, held))


def _progress(seen: Observation) -> Finding:
    at_work = sum(node.state == "running" for node in seen.nodes)
    if at_work and all(node.ended or node.state == "running" for node in seen.nodes):
        silences = [(silence, node) for node in seen.nodes if (silence := silent_s(node, seen)) is not None]
        silence, quiet = max(silences, key=lambda pair: pair[0], default=(0.0, None))
        but = "" if quiet is None else f", but the agent of node {quiet.name} has been silent for {silence:.0f} s"
        return State.running, "running", f"{_ranks(seen)} at work{but}"
    waiting = ", ".join(str(job) for job in seen.jobs if job.state and job.state.pending)
    if seen.start.restarts:
        where = f": {waiting}" if waiting else ""
        why = f", because {seen.restarted.reason}" if seen.restarted is not None and waiting else ""
        reason = f"waiting to be started again (restart {seen.start.restarts}){why}{where}; {saved(seen)}"
        return State.starting, "restarting", reason
    preparing = next((node for node in seen.nodes if node.alive and node.doing), None)
    if preparing is not None:
        reason = f"node {preparing.name} prepares its container, waiting for {preparing.doing}"
        return State.starting, "preparing", reason
    there = f"{at_work} of {plural(len(seen.nodes), 'node')} at work, " if at_work else ""
    return State.starting, "starting", there + (waiting or "waiting for its nodes to start")


def _name(seen: Observation) -> str:
    return seen.plan.run


def _ranks(seen: Observation) -> str:
    return plural(len(seen.plan.ranks), "rank")


RULES = (
    _unreadable,
    _regroups,
    _failure,
    _stop,
    _interrupted,
    _ended_from_outside,
    _stood_still,
    _gave_up,
    _symptoms,
    _not_finite,
    _spent,
    _success,
    _unknown,
    _unwatched,
    _failing,
    _hung,
    _pace,
    _halted,
    _progress,
)
"""The first that finds something decides; the last one always does."""
