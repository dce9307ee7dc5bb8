"""What can be said of a run whatever is thought of it: the evidence of a verdict, and its words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launch.files.attempt import Start
from launch.judge import gpu_health
from launch.judge.observe import Observation
from launch.judge.pace import held_up_by, held_up_words, median_ms
from launch.judge.plan_line import plan_line

FULL_BYTES = 64 * 1024
"""A disk with less room than this counts as full."""
FULL_DISK = "the disk of the run folder is full"


def evidence(seen: Observation, later: Iterable[str]) -> Iterator[str]:
    """Line by line, for people; `later` are causes of failure but for the first."""
    yield f"plan: {plan_line(seen.plan)}"
    if seen.silence is not None:
        yield f"what Slurm would tell is missing: {seen.silence}"
    for job in seen.jobs:
        left = f", {job.state.time_left} left" if job.state and job.state.state == "RUNNING" else ""
        yield f"{job}{left}: {', '.join(job.nodes)}"
    if seen.start > Start(0, 0):
        yield f"start {seen.start} (submission.restart); {saved(seen)}"
    if seen.log:
        last = seen.log[-1]
        yield (
            f"iteration: {last.iteration} of {seen.iterations}, {_loss(seen)}, {median_ms(seen):.1f} ms per "
            f"iteration (median), logged {ago(seen.now_unix - last.unix)}"
        )
    else:
        yield f"iteration: none of {seen.iterations} logged yet"
    for node in seen.nodes:
        if node.ended:
            how = f", told to end by {node.stopped}" if node.stopped else ""
            how += f": it {first_line(node.reason)}" if node.reason else ""
            yield f"node {node.name}: ended with {node.exit_code}{how}"
        else:
            sign = "" if node.alive or node.unseen else ", but no process of it lives"
            state = "not started" if node.state == "absent" else node.state
            state += f", waiting for {node.doing}" if node.doing else ""
            yield f"node {node.name}: {state}{sign}"
    for node_gpus in seen.gpus:
        line = gpu_health.evidence(node_gpus, seen.now_unix)
        if line is not None:
            yield line
    if not seen.over and (held := held_up_by(seen)):
        yield held_up_words(seen, held, "keeps the others waiting")
    for reason in later:
        yield f"later: {first_line(reason)}"
    if disk_is_full(seen):
        yield f"{FULL_DISK}: {seen.free_bytes} bytes are free"
    symptoms = sum(error.symptom for error in seen.errors)
    if symptoms:
        yield f"{symptoms} rank{'s' * (symptoms > 1)} failed only because another one was lost"


def _loss(seen: Observation) -> str:
    loss = seen.log[-1].loss
    if loss is not None:
        return f"loss {loss:.4f}"
    return "rehearsed, so without a loss" if seen.plan.rehearsal else "all skipped"


def disk_is_full(seen: Observation) -> bool:
    """Nothing that fails for this can write why."""
    return seen.free_bytes < FULL_BYTES


def saved(seen: Observation) -> str:
    return "nothing was saved" if seen.saved is None else f"saved after iteration {seen.saved}"


def first_line(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return f"{first}{' …' if more else ''}"


def ago(seconds: float) -> str:
    return f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """In the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
