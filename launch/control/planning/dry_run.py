"""What `dry_run=true` prints: the plan, and what would be started with it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ExecutorKind, Experiment
from conf.visible import plural
from launch.control.executors.jobs import job_requests
from launch.control.executors.sbatch import sbatch_text
from launch.control.executors.slurm import submission_of
from launch.control.planning.plan import make_plan
from launch.control.submit import node_worker, resumable, run_environment
from launch.files.attempt import Start
from launch.judge.plan_line import plan_line
from launch.machine import ssh
from launch.machine.container_commands import UNKNOWN_NAME, Command, SlurmStep, preparation, run_container
from launch.machine.provenance import PROJECT
from launch.node.own_caches import own_caches
from launch.node.worker_command import SCRUBBED, Worker, given_environment
from launch.node.workplace import process_to_start
from launch.screen.table import plain
from megatron_ext.contract.plan import Plan

FOLDER = "<time>-<hash>"
TOKEN = "<token>"
FIRST_START = str(Start(0, 0))
MASTER_JOB = "<id of the master job>"
HOST = "<host>"
"""Stand for what is only known when a run starts."""
_STARTER = {
    ExecutorKind.local: "submitit's LocalExecutor",
    ExecutorKind.slurm: "submitit's SlurmExecutor",
    ExecutorKind.hosts: "ssh and there by submitit's LocalExecutor",
}


def dry_run_text(experiment: Experiment, worker: str, behind: Sequence[str] = ()) -> str:
    """The ranks, each node's command line with its environment, and plan.json.

    `behind` stands for the ids of jobs that must have ended before the run starts.
    """
    name = f"{experiment.name}/{FOLDER}"
    plan = make_plan(experiment, name)
    run = Path(experiment.runs_dir).absolute() / name
    on_slurm = experiment.executor.kind is ExecutorKind.slurm
    count = len(plan.nodes)
    parts = [
        f"run {name} in {run.parent}",
        plan_line(plan),
        _ranks(plan),
        *(_scripts(experiment, plan, run, behind) if on_slurm else ()),
        f"{plural(count, 'node agent')}, started by {_STARTER[experiment.executor.kind]}; each runs",
        *_nodes(experiment, plan, run, node_worker(experiment, plan, RunDir(run), worker)),
        f"plan.json\n{json.dumps(plan.as_json(), indent=1)}",
    ]
    return "\n\n".join(parts)


def _scripts(experiment: Experiment, plan: Plan, run: Path, behind: Sequence[str]) -> Iterator[str]:
    """What sbatch is given, byte for byte but for what is only known then."""
    submission = submission_of(experiment, run, TOKEN, resumable(plan), behind)
    for number, request in enumerate(job_requests(experiment)):
        yield f"sbatch/{request.role}.sh\n{sbatch_text(submission, request, after=MASTER_JOB if number else None)}"


def _nodes(experiment: Experiment, plan: Plan, run: Path, worker: Worker) -> Iterator[str]:
    """The commands of each node; those that make its container it leaves out where image and container are there."""
    container = run_container(experiment, plan, run, PROJECT)
    environment = run_environment(experiment, plan, TOKEN, os.environ)
    steps = _steps(experiment)
    for rank, node in enumerate(plan.nodes):
        given = {name: f"<{name} of this shell>" for name in experiment.cluster.environment_from}
        given |= own_caches(RunDir(run), node.name) | given_environment(environment, plan, rank, FIRST_START)
        started = process_to_start(container, UNKNOWN_NAME, worker.shown(run, rank), given, {}, steps[rank])
        prepared = [shlex.join(words) for words in preparation(container, rank)] if container else []
        if experiment.executor.kind is ExecutorKind.hosts:
            prepared.insert(0, shlex.join(ssh.command(node.name, "start")))
        yield "\n    ".join([f"  on {node.name}:", *prepared, _command(started)])


def _steps(experiment: Experiment) -> dict[int, SlurmStep]:
    """By node rank: where pyxis would start the worker."""
    return {
        node: SlurmStep(node=HOST, cpus=cpus, het_group=number)
        for request in job_requests(experiment)
        for node, cpus, number in zip(request.nodes, request.cpus_per_task, request.het_groups, strict=True)
    }


def _ranks(plan: Plan) -> str:
    columns = ("rank", "node", "gpu", "local rank", "stage", "dp", "tp", plan.model.counted_name())
    rows = []
    for place in plan.ranks:
        node = plan.nodes[place.node]
        numbers = (str(number) for number in (place.local_rank, place.stage, place.dp, place.tp))
        rows.append((str(place.rank), node.name, node.gpu, *numbers, stage_contents(plan, place.stage)))
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


def _command(command: Command) -> str:
    """As a shell would run it with this environment; everything else of it is inherited."""
    unset = [word for name in SCRUBBED if name not in command.environment for word in ("-u", name)]
    settings = [f"{name}={value}" for name, value in command.environment.items()]
    return shlex.join(["env", *unset, *settings, *command.argv])
