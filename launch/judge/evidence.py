"""The evidence of a verdict: what can be said of a run whatever is thought of it, among it nodes that are silent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from conf.schema.values.partition import NodeOrder, Partition
from conf.visible import loss_text, plural
from launch.files.records import REQUEUED, Start
from launch.judge import gpu_health
from launch.judge.progress import costs, held_up_by, held_up_words, outlook, samples_per_s, time_of
from launch.judge.state import State
from launch.node.peers import SILENCE_S
from launch.observe.iterations import Iteration
from launch.observe.observation import Observation, RunKind, SeenNode
from launch.screen import ago, clock, first_line
from megatron_ext.contract.plan import Plan


def short_plan(plan: Plan) -> str:
    """Writes a plan for a cell of a table: sizes, partition, micro-batch of the global batch, nodes in their order."""
    sizes = plan.sizes
    return (
        f"tp{sizes['tensor']} dp{sizes['data']} pp{sizes['pipeline']}, {_layers(plan)}, "
        f"batch {plan.micro_batch_size}/{plan.global_batch_size}, "
        f"{NodeOrder(tuple(node.group for node in plan.planned_nodes))}"
    )


def plan_line(plan: Plan) -> str:
    """The plan in one line."""
    return (
        f"{' x '.join(f'{key} {size}' for key, size in plan.sizes.items())}, partition "
        f"{_layers(plan)}, micro-batch {plan.micro_batch_size}, global batch "
        f"{plan.global_batch_size}, {plural(len(plan.ranks), 'rank')} on {plural(len(plan.used), 'node')}"
    )


def _layers(plan: Plan) -> str:
    """Layers by stage, and by island where each has a plan of its own."""
    return "/".join(str(Partition(tuple(own.partition))) for own in plan.by_island)


FULL_BYTES = 64 * 1024
"""A disk with less room than this counts as full."""
FULL_DISK = "the disk of the run folder is full"


@dataclass(frozen=True)
class Evidence:
    """A line for people: what it is about, which node of the run if it is about one, and what there is to say."""

    label: str
    text: str
    node: str = ""

    def __str__(self) -> str:
        about = f"{self.label} {self.node}".strip()
        return f"{about}: {self.text}" if about else self.text


OF_NODE, OF_GPUS = "node", "GPUs of"
"""Labels of what is about a node."""


def evidence_of(seen: Observation, judged: State, later: Iterable[str]) -> Iterator[Evidence]:
    """Lists the evidence of a run that was judged to be in a state; `later` are causes of failure but for the first."""
    yield Evidence("plan", plan_line(seen.plan))
    if seen.silence is not None:
        yield Evidence("no answer from Slurm", seen.silence)
    for job in seen.jobs:
        left = f", {job.state.time_left} left" if job.state and job.state.state == "RUNNING" else ""
        yield Evidence(f"{job}{left}", ", ".join(job.nodes))
    if seen.job_ids and not seen.jobs:
        yield Evidence("jobs", ", ".join(seen.job_ids))
    if seen.start > Start(0, 0):
        why = f"start {seen.start} (submission.restart)"
        if seen.restarted is not None:
            waits = any(job.state is not None and job.state.pending for job in seen.jobs)
            when = "waits to be restarted" if waits else f"restarted {clock(seen.restarted.unix, seen.now_unix)}"
            why = f"{when}: {seen.restarted.reason}; {why}"
        yield Evidence("", f"{why}; {saved(seen)}")
    if seen.log:
        last = seen.log[-1]
        progress = f"{last.iteration} of {seen.of_iterations}{_in_its_terms(seen)}, {_loss(seen)}, {_speed(seen)}, "
        yield Evidence("iteration", progress + f"logged {ago(seen.now_unix - last.unix)}")
    else:
        yield Evidence("iteration", f"none of {seen.of_iterations} logged{'' if seen.over else ' yet'}")
    if (expected := outlook(seen, judged)).text:
        yield Evidence("start" if expected.queued else "end", expected.text)
    if (cost := costs(seen, judged)) is not None:
        yield Evidence("cost", str(cost))
    if (evaluated := next((line for line in reversed(seen.log) if line.evaluation), None)) is not None:
        yield Evidence("evaluation", f"{_evaluation(evaluated)}, after iteration {evaluated.iteration}{_wanted(seen)}")
    for node in seen.nodes:
        if node.ended:
            how = f", ended by {node.stopped}" if node.stopped else ""
            how += f": it {first_line(node.reason)}" if node.reason else ""
            yield Evidence(OF_NODE, f"exited with {node.exit_code}{how}", node.name)
        else:
            sign = "" if node.alive or node.unseen else ", but none of its processes is alive"
            state = "not started" if node.state == "absent" else node.state
            state += f", waiting for {node.doing}" if node.doing else ""
            silence = silent_s(node, seen)
            state += f", but its agent has been silent for {silence:.0f} s" if silence is not None else ""
            yield Evidence(OF_NODE, f"{state}{sign}", node.name)
    for words in seen.clocks:
        yield Evidence("clock", words)
    for node_gpus in seen.gpus:
        if (summary := gpu_health.summary(node_gpus, seen.now_unix)) is not None:
            yield Evidence(OF_GPUS, summary, node_gpus.node)
    if not seen.over and (held := held_up_by(seen)):
        yield Evidence(*held_up_words(seen, held, "keeps the others waiting"))
    for doing in held_up_by(seen)[:STACKS]:
        if doing.stack:
            frames = " < ".join(frame.rpartition("/")[2] for frame in doing.stack[:FRAMES])
            yield Evidence("stack", f"rank {doing.rank}: {frames}")
    for reason in later:
        yield Evidence("later", first_line(reason))
    if disk_is_full(seen):
        yield Evidence(FULL_DISK, f"{seen.free_bytes} bytes free")
    symptoms = sum(error.symptom for error in seen.errors)
    if symptoms:
        yield Evidence("", f"{plural(symptoms, 'rank')} failed only because another one was lost")


def _in_its_terms(seen: Observation) -> str:
    """How far a run is whose length is in epochs or samples."""
    consumed = seen.log[-1].consumed_samples
    terms = "" if consumed is None else seen.plan.train.progress(consumed)
    return f", {terms}" if terms else ""


def _speed(seen: Observation) -> str:
    """The time of an iteration or sample; of a batch that adapts also the samples a second at its newest size."""
    time, rate = time_of(seen), samples_per_s(seen)
    assert time is not None, "the log has a line"
    text = f"{time.figure} ms {time.unit} ({'median' if not time.alone else time.basis})"
    return f"{text}, {rate:,.1f} samples/s at the newest batch" if seen.adapts and rate is not None else text


def _evaluation(line: Iteration) -> str:
    found = line.evaluation.items()
    return ", ".join(f"{name} {'not finite' if value is None else f'{value:.6g}'}" for name, value in found)


def _wanted(seen: Observation) -> str:
    train = seen.plan.train
    return "" if train.until is None else f"; train.until={train.until}"


def _loss(seen: Observation) -> str:
    loss = seen.log[-1].loss
    if loss is not None:
        return f"loss {loss_text(loss)}"
    return "no loss (rehearsal)" if seen.plan.rehearsal else "all iterations skipped"


def disk_is_full(seen: Observation) -> bool:
    """Nothing that fails for this can write why."""
    return seen.free_bytes < FULL_BYTES


def saved(seen: Observation) -> str:
    if seen.kept is not None and seen.kept > (seen.saved or 0):
        return f"saved after iteration {seen.kept}, in the memory of the nodes"
    return "nothing was saved" if seen.saved is None else f"saved after iteration {seen.saved}"


STACKS, FRAMES = 3, 8
"""So many ranks that stand still are shown, with so many of their innermost frames."""
NOTED_S = 10.0
"""From then on it is said; an agent writes every two seconds, on a busy file system less often."""


def silent_s(node: SeenNode, seen: Observation) -> float | None:
    """Returns how long a node at work has shown no life; None for no longer than is usual.

    As long as the run logs iterations all of its nodes live, whatever the clock of one of them says.
    """
    if seen.kind not in (RunKind.slurm, RunKind.hosts) or node.ended or not node.alive or node.unseen is not None:
        return None
    if node.state in ("absent", REQUEUED):
        return None
    logged = seen.log[-1].unix if seen.log else 0.0
    silence = seen.now_unix - max(node.seen_unix, logged)
    return silence if silence > NOTED_S else None


def silent_nodes(seen: Observation) -> list[tuple[float, SeenNode]]:
    """Those that may be lost, the longest silence first: silent for `SILENCE_S`, or for less where ranks already lost
    others."""
    least = NOTED_S if any(error.symptom for error in seen.errors) else SILENCE_S
    found = [(silence, node) for node in seen.nodes if (silence := silent_s(node, seen)) is not None]
    return sorted([pair for pair in found if pair[0] > least], key=lambda pair: -pair[0])
