"""What `dry_run=true` prints: the plan, and what would be started with it."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ExecutorKind, Experiment
from conf.visible import plural, rank_ranges
from launch.control.executors.sbatch import job_requests, sbatch_text
from launch.control.executors.slurm import join_scripts, later_nodes, submission_of
from launch.control.planning.plan import make_plan
from launch.control.submit import node_worker, run_environment
from launch.files.records import Start
from launch.judge.evidence import plan_line
from launch.machine import ssh
from launch.machine.container_commands import run_container
from launch.machine.container_runtimes import UNKNOWN_NAME, Command, SlurmStep
from launch.machine.provenance import PROJECT
from launch.node.own_caches import own_caches
from launch.node.worker_command import SCRUBBED, WORKER, Worker, given_environment
from launch.node.worker_process import process_to_start
from launch.screen import plain
from megatron_ext.contract.plan import Plan

FOLDER = "<time>-<hash>"
TOKEN = "<token>"
FIRST_START = str(Start(0, 0))
MASTER_JOB = "<id of the master job>"
HOST = "<host>"
"""Stand for what is only known when a run starts."""
MOST_NAMES = 3
"""So many nodes are named; of more only the first and the last."""
_STARTER = {
    ExecutorKind.local: "submitit's LocalExecutor",
    ExecutorKind.slurm: "sbatch",
    ExecutorKind.hosts: "ssh and there by submitit's LocalExecutor",
}


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What would be started: to be read, and in full."""

    heading: str
    folder: str
    """The run's."""
    plan_line: str
    training: str | None
    """In a line; None of a short job, which trains nothing."""
    stages: str
    ranks: str
    scripts: Mapping[str, str]
    """What sbatch is given, byte for byte but for what is only known then: by the script's name."""
    started: str
    """How the agents are started."""
    nodes: Sequence[NodeCommands]
    plan: str
    """plan.json."""

    def readable(self) -> str:
        """The plan by stages, each script, and once the commands of nodes that differ by their number alone."""
        return self._parts(self.stages, [group.text for group in alike(self.nodes)])

    def scripts_and_nodes(self) -> dict[str, str]:
        """What is started, by what it is. Apart from the name of the run, which its paths contain, dry runs may share
        it."""
        nodes = "\n".join(group.text for group in alike(self.nodes))
        texts = {**self.scripts, "nodes": nodes}
        return {name: text.replace(self.folder, "<run>") for name, text in texts.items()}

    def full(self) -> str:
        """Every rank, every node's commands and plan.json."""
        nodes = [_commands(f"on {node.name}", node.commands) for node in self.nodes]
        return self._parts(self.ranks, [*nodes, f"plan.json\n{self.plan}"])

    def _parts(self, places: str, rest: Sequence[str]) -> str:
        lines = "\n".join([self.plan_line, *([self.training] if self.training else [])])
        scripts = [f"{name}\n{text}" for name, text in self.scripts.items()]
        return "\n\n".join(
            [
                self.heading,
                lines,
                places,
                *scripts,
                f"{self.started}; {'it' if len(self.nodes) == 1 else 'each'} runs",
                *rest,
            ]
        )


@dataclass(frozen=True, kw_only=True)
class NodeCommands:
    """A node's number and name, and the commands that it runs, as words."""

    rank: int
    name: str
    commands: Sequence[Sequence[str]]

    def is_like(self, other: NodeCommands) -> bool:
        """Whether they differ by what each node has for itself alone: its number and its name."""
        return [len(words) for words in self.commands] == [len(words) for words in other.commands] and all(
            mine == others or self._own_of(mine, other, others)
            for one, two in zip(self.commands, other.commands, strict=True)
            for mine, others in zip(one, two, strict=True)
        )

    def _own_of(self, mine: str, other: NodeCommands, others: str) -> bool:
        number = str(self.rank)
        numbered = mine.removesuffix(number) + str(other.rank) if mine.endswith(number) else mine
        return others in (numbered, mine.replace(self.name, other.name))


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Nodes with the same commands, but for what each has for itself."""

    nodes: Sequence[NodeCommands]

    @property
    def text(self) -> str:
        first, *others = self.nodes
        heading = f"on {first.name}"
        if others:
            heading += f", and with its own number on each of {named([node.name for node in others])}"
        return _commands(heading, first.commands)


def alike(nodes: Sequence[NodeCommands]) -> list[Alike]:
    """Groups nodes that are alike, in the order of the first node of each."""
    groups: list[list[NodeCommands]] = []
    for node in nodes:
        same = next((group for group in groups if group[0].is_like(node)), None)
        if same is None:
            groups.append([node])
        else:
            same.append(node)
    return [Alike(nodes=group) for group in groups]


def named(names: Sequence[str]) -> str:
    """Names of nodes in their order, of many the first and the last."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} nodes, {names[0]} to {names[-1]}"


def dry_run(experiment: Experiment, worker: str, behind: Sequence[str] = ()) -> DryRun:
    """`behind` stands for the ids of jobs that must have ended before the run starts."""
    name = f"{experiment.name}/{FOLDER}"
    plan = make_plan(experiment, name)
    run = Path(experiment.runs_dir).absolute() / name
    on_slurm = experiment.executor.kind is ExecutorKind.slurm
    return DryRun(
        heading=f"run {name} in {run.parent}",
        folder=str(run),
        plan_line=plan_line(plan),
        training=_training(experiment) if worker == WORKER else None,
        stages=_stages(plan),
        ranks=_ranks(plan),
        scripts=dict(_scripts(experiment, plan, run, behind)) if on_slurm else {},
        started=_started(experiment, plan),
        nodes=list(_nodes(experiment, plan, run, node_worker(experiment, plan, RunDir(run), worker))),
        plan=json.dumps(plan.as_json(), indent=1),
    )


def _started(experiment: Experiment, plan: Plan) -> str:
    later = len(later_nodes(experiment, plan))
    agents = f"{plural(len(plan.nodes) - later, 'node agent')}, started by {_STARTER[experiment.executor.kind]}"
    return f"{agents}, and {later} later, each by a job of its own once Slurm has a node for it" if later else agents


def _training(experiment: Experiment) -> str:
    train, model = experiment.train, experiment.model
    return (
        f"model {model.name} in {train.precision}, {plural(train.iterations or 0, 'iteration')}"
        f"{f', data {experiment.data.prefix}' if not model.traits.user_code else ''}"
    )


def _scripts(experiment: Experiment, plan: Plan, run: Path, behind: Sequence[str]) -> Iterator[tuple[str, str]]:
    before = experiment.executor.after
    after = () if before is None else (f"<jobs of {before}>",)
    submission = submission_of(experiment, run, TOKEN, plan.resumable, behind, after)
    later = later_nodes(experiment, plan)
    for number, request in enumerate(job_requests(experiment, {*range(len(plan.nodes))} - {*later})):
        yield f"sbatch/{request.role}.sh", sbatch_text(submission, request, after=MASTER_JOB if number else None)
    for join in join_scripts(experiment, submission, plan.node_names) if later else ():
        if join.node in later:
            script = RunDir(run).join_script(submission.number, plan.node_names[join.node])
            yield f"{script.relative_to(run)}", join.text


def _nodes(experiment: Experiment, plan: Plan, run: Path, worker: Worker) -> Iterator[NodeCommands]:
    """The commands of each node; those that make its container it leaves out where image and container are there."""
    container = run_container(experiment, plan, run, PROJECT)
    environment = run_environment(experiment, plan, TOKEN, os.environ)
    steps = _steps(experiment)
    later = later_nodes(experiment, plan)
    for rank, node in enumerate(plan.nodes):
        if rank in later:
            continue
        given = {name: f"<{name} of this shell>" for name in experiment.cluster.environment_from}
        given |= own_caches(RunDir(run), node.name) | given_environment(environment, plan, rank, FIRST_START)
        started = process_to_start(container, UNKNOWN_NAME, worker.shown(run, rank), given, {}, steps[rank])
        prepared = container.runtime.preparation(container, rank) if container else []
        if experiment.executor.kind is ExecutorKind.hosts:
            prepared.insert(0, ssh.command(node.name, "start"))
        yield NodeCommands(rank=rank, name=node.name, commands=[*prepared, _command(started)])


def _commands(heading: str, commands: Sequence[Sequence[str]]) -> str:
    return "\n    ".join([f"  {heading}:", *map(shlex.join, commands)])


def _steps(experiment: Experiment) -> dict[int, SlurmStep]:
    """Returns where pyxis would start the worker, by node rank."""
    return {
        node: SlurmStep(node=HOST, cpus=cpus, het_group=number)
        for request in job_requests(experiment)
        for node, cpus, number in zip(request.nodes, request.cpus_per_task, request.het_groups, strict=True)
    }


def _stages(plan: Plan) -> str:
    """A row for each stage: what it holds, and where."""
    by_tensor = any(place.tp for place in plan.ranks)
    rows = []
    for stage in plan.stages:
        places = [plan.ranks[rank] for rank in stage.ranks]
        nodes = [plan.nodes[number] for number in dict.fromkeys(place.node for place in places)]
        gpus = Counter(plan.nodes[place.node].gpu for place in places)
        split = [str(1 + max(place.tp for place in places))] * by_tensor
        replicas = str(len({place.dp for place in places}))
        kinds = ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items())
        on = named([node.name for node in nodes])
        rows.append(
            (
                stage.name,
                stage_contents(stage.plan, stage.number),
                replicas,
                *split,
                kinds,
                on,
                rank_ranges(place.rank for place in places),
            )
        )
    columns = ("stage", plan.model.counted_name(), "replicas", *["tensor"] * by_tensor, "GPUs", "on", "ranks")
    return plain(columns, rows)


def _ranks(plan: Plan) -> str:
    columns = ("rank", "node", "gpu", "local rank", "stage", "dp", "tp", plan.model.counted_name())
    rows = []
    for place in plan.ranks:
        node = plan.nodes[place.node]
        numbers = (str(number) for number in (place.local_rank, place.stage, place.dp, place.tp))
        rows.append(
            (str(place.rank), node.name, node.gpu, *numbers, stage_contents(plan.of_island(place), place.stage))
        )
    return plain(columns, rows)


def stage_contents(plan: Plan, stage: int) -> str:
    """What a stage holds; of several chunks it has part `stage`, `stage + pipeline` and so on of the model.

    The embedding is on the first stage, the final norm and the head are on the last, where a model has them.
    """
    kinds = dict(plan.model.all_kinds())
    holds = ["embedding"] if stage == 0 and "embedding" in kinds else []
    for part in range(stage, len(plan.partition), plan.pipeline):
        if plan.blocks is not None:
            holds += [plan.named(part)] * (plan.partition[part] > 0)
            continue
        for stack, held in plan.model.spans(plan.layers_of(part)):
            holds += [kind.replace("_", " ") for kind in plan.model.before(stack.kind) if held[0] == stack.first]
            holds.append(
                f"{stack.name} {held[0]}-{held[-1]}" if len(held) > 1 else f"{stack.kind.partition('_')[0]} {held[0]}"
            )
    if stage == plan.pipeline - 1 and "head" in kinds:
        holds.append("norm, head")
    return ", ".join(holds) or "nothing (passes data on)"


def _command(command: Command) -> list[str]:
    """Returns the words by which a shell would run it with this environment; everything else is inherited."""
    unset = [word for name in SCRUBBED if name not in command.environment for word in ("-u", name)]
    settings = [f"{name}={value}" for name, value in command.environment.items()]
    return ["env", *unset, *settings, *command.argv]
