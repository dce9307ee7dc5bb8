"""From an experiment to a run that has been started, or to nothing at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.rundir import RunDir, write_atomic
from conf.schema import ContainerKind, EngineKind, ExecutorKind, Experiment, Rehearse
from launch import local, megatron_lm, processes, profilers
from launch.agent import WORKER, ModuleWorker, NodeAgent, Worker
from launch.errors import LaunchError
from launch.plan import make_plan
from launch.provenance import PROJECT, provenance, source_diff

Preflight = Callable[[Experiment], None]
"""Raises a TdppError if the experiment cannot run, for example because its data are not there."""

_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")
_KILL_GRACE_S = 3.0


def submit(experiment: Experiment, overrides: Sequence[str], preflight: Preflight, worker: str = WORKER) -> RunDir:
    """Makes the run's folder and starts the run. If anything goes wrong, no process and no folder is left.

    Raises:
        TdppError: the run cannot be started.
    """
    check_supported(experiment)
    if experiment.executor.rehearse is Rehearse.none:  # a rehearsal reads no data
        preflight(experiment)
    local.check_port(experiment.executor.master_port)
    profilers.check(experiment)
    if experiment.engine.kind is EngineKind.megatron_lm:
        megatron_lm.check(experiment)
    config = OmegaConf.to_yaml(OmegaConf.create(asdict(experiment)))
    run = RunDir.create(Path(experiment.runs_dir), experiment.name, config, datetime.now())
    token = secrets.token_hex(16)
    try:
        plan = make_plan(experiment, run.name)
        write_atomic(run.config, config)
        if experiment.parallel.schedule_file is not None:
            write_atomic(run.schedule, _schedule(experiment.parallel.schedule_file))
        write_atomic(run.overrides, "".join(f"{override}\n" for override in overrides))
        write_atomic(run.diff, source_diff())
        run.write_json(run.provenance, provenance())
        run.write_json(run.jobs, {"token": token, "executor": "local", "jobs": []})
        run.write_json(run.plan, plan)
        environment = run_environment(plan, experiment.cluster.environment, token, os.environ)
        agent = NodeAgent(
            run=run,
            model=experiment.model.name,
            environment=environment,
            worker=node_worker(experiment, plan, run, worker),
            gpu_interval_s=experiment.profile.gpu_interval_s if plan["device"] == "cuda" else 0,
        )
        local.start(agent, token, len(plan["nodes"]), experiment.executor.time_min)
        for job in run.read_json(run.jobs)["jobs"]:
            _link(run, job["id"])
    except BaseException:
        processes.terminate(token, _KILL_GRACE_S)
        shutil.rmtree(run.path)
        with contextlib.suppress(OSError):  # other runs of the name are there
            run.path.parent.rmdir()
        raise
    return run


def _schedule(path: str) -> str:
    """The content of `parallel.schedule_file`; the engine checks it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"parallel.schedule_file={path}: cannot be read as text ({error}); give the path of a schedule, such as "
            "'python -m megatron_ext.schedule' prints, or null"
        ) from error


def check_supported(experiment: Experiment) -> None:
    """Raises LaunchError for what this version cannot start."""
    kind, container = experiment.executor.kind, experiment.container.kind
    if kind is not ExecutorKind.local:
        raise LaunchError(
            f"executor.kind={kind}: this version starts runs on this machine only; use executor=local (with "
            "dry_run=true it shows any plan)"
        )
    if container is not ContainerKind.none:
        raise LaunchError(
            f"container.kind={container}: this version starts runs on this machine only, without containers; use "
            "container=none"
        )
    partitions = {name: experiment.cluster.groups[name].partition for name in experiment.node_order.groups}
    elsewhere = [f"cluster.groups.{name}.partition={partition}" for name, partition in partitions.items() if partition]
    if elsewhere and experiment.executor.rehearse is Rehearse.none and not experiment.dry_run:
        raise LaunchError(
            f"{', '.join(elsewhere)}: these are Slurm's nodes, but this version starts runs on this machine only; "
            "executor.rehearse=virtual goes through the plan without them, and dry_run=true prints it"
        )
    path = str(Path(experiment.runs_dir).absolute() / experiment.name)
    for tag in _SUBMITIT_TAGS:
        if tag in path:
            raise LaunchError(
                f"runs_dir={experiment.runs_dir}, name={experiment.name}: {path} holds {tag!r}, which submitit "
                "replaces in paths; choose a path without it"
            )


def node_worker(experiment: Experiment, plan: Mapping[str, Any], run: RunDir, module: str) -> Worker:
    """What runs the ranks of a node; `module` is the worker of tdpp's own engine."""
    worker: Worker = ModuleWorker(module)
    if experiment.engine.kind is EngineKind.megatron_lm:
        worker = megatron_lm.worker(experiment, plan, run)
    return profilers.profiled(worker, experiment, plan)


def run_environment(
    plan: Mapping[str, Any], cluster: Mapping[str, str], token: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """What the run gives to every worker, over what the worker inherits. `cluster` is `cluster.environment`."""
    paths = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(PROJECT))]
    given = {"PYTHONPATH": os.pathsep.join([str(PROJECT), *paths])}
    if plan["device"] == "cpu":
        given["OMP_NUM_THREADS"] = "1"
    if plan.get("engine") == "megatron_lm":
        given |= megatron_lm.ENVIRONMENT
    if "CUDA_VISIBLE_DEVICES" in inherited:
        given["CUDA_VISIBLE_DEVICES"] = inherited["CUDA_VISIBLE_DEVICES"]
    return given | dict(cluster) | {processes.TOKEN: token}


def _link(run: RunDir, job_id: str) -> None:
    """Makes by_job/<id> lead to the run. A local job's id is a process id: an older run may have had it."""
    link = run.runs / "by_job" / job_id
    link.parent.mkdir(exist_ok=True)
    fresh = link.with_name(f".{job_id}.{os.getpid()}")
    fresh.symlink_to(os.path.relpath(run.path, link.parent))
    fresh.replace(link)
