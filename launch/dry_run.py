"""What `dry_run=true` prints: the plan, and what would be started with it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.rundir import RunDir
from conf.schema import ExecutorKind, Experiment
from launch.jobs import job_requests
from launch.plan import make_plan
from launch.plan_line import plan_line
from launch.sbatch import sbatch_text
from launch.slurm import submission_of
from launch.start import Start
from launch.submit import node_worker, resumable, run_environment
from launch.table import plain
from launch.worker import SCRUBBED, given_environment

FOLDER = "<time>-<hash>"
TOKEN = "<token>"
FIRST_START = str(Start(0, 0))
MASTER_JOB = "<id of the master job>"
"""Stand for what is only known when a run starts."""


def dry_run_text(experiment: Experiment, worker: str, behind: Sequence[str] = ()) -> str:
    """The ranks, each node's command line with its environment, and plan.json.

    `behind` stands for the ids of jobs that must have ended before the run starts.
    """
    name = f"{experiment.name}/{FOLDER}"
    plan = make_plan(experiment, name)
    run = Path(experiment.runs_dir).absolute() / name
    on_slurm = experiment.executor.kind is ExecutorKind.slurm
    inherited = {k: v for k, v in os.environ.items() if not (on_slurm and k == "CUDA_VISIBLE_DEVICES")}
    environment = run_environment(plan, experiment.cluster.environment, TOKEN, inherited)
    runner = node_worker(experiment, plan, RunDir(run), worker)
    count = len(plan["nodes"])
    executor = "SlurmExecutor" if on_slurm else "LocalExecutor"
    parts = [
        f"run {name} in {run.parent}",
        plan_line(plan),
        _ranks(plan),
        *(_scripts(experiment, plan, run, behind) if on_slurm else ()),
        f"{count} node agent{'s' * (count > 1)}, started by submitit's {executor}; each runs",
        *(
            f"  on {node['name']}:\n"
            f"    {_command(runner.shown(run, rank), given_environment(environment, plan, rank, FIRST_START))}"
            for rank, node in enumerate(plan["nodes"])
        ),
        f"plan.json\n{json.dumps(plan, indent=1)}",
    ]
    return "\n\n".join(parts)


def _scripts(experiment: Experiment, plan: Mapping[str, Any], run: Path, behind: Sequence[str]) -> Iterator[str]:
    """What sbatch is given, byte for byte but for what is only known then."""
    submission = submission_of(experiment, run, TOKEN, resumable(plan), behind)
    for number, request in enumerate(job_requests(experiment)):
        yield f"sbatch/{request.role}.sh\n{sbatch_text(submission, request, after=MASTER_JOB if number else None)}"


def _ranks(plan: Mapping[str, Any]) -> str:
    columns = ("rank", "node", "gpu", "local rank", "stage", "dp", "tp", "layers")
    rows = []
    for place in plan["ranks"]:
        node = plan["nodes"][place["node"]]
        numbers = [str(place[key]) for key in ("local_rank", "stage", "dp", "tp")]
        layers = stage_contents(plan["partition"], plan["pipeline"], place["stage"])
        rows.append((str(place["rank"]), node["name"], node["gpu"], *numbers, layers))
    return plain(columns, rows)


def stage_contents(partition: list[int], pipeline: int, stage: int) -> str:
    """What a stage holds; of several chunks it has part `stage`, `stage + pipeline` and so on of the model.

    The embedding is on the first stage, the final norm and the head are on the last.
    """
    holds = ["embedding"] if stage == 0 else []
    for part in range(stage, len(partition), pipeline):
        first, count = sum(partition[:part]), partition[part]
        if count:
            holds.append(f"layers {first}-{first + count - 1}" if count > 1 else f"layer {first}")
    if stage == pipeline - 1:
        holds.append("norm, head")
    return ", ".join(holds) or "nothing, passes on"


def _command(words: Sequence[str], given: Mapping[str, str]) -> str:
    """As a shell would run it with this environment; everything else of it is inherited."""
    unset = [word for name in SCRUBBED if name not in given for word in ("-u", name)]
    settings = [f"{name}={value}" for name, value in given.items()]
    return shlex.join(["env", *unset, *settings, *words])
