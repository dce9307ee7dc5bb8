"""A short job on an experiment's nodes that trains nothing: made from the experiment, waited for, cleared away.

It goes the way of every launch (plan, executor, container, node agents), with another worker. Its folder is below
`<runs_dir>/<folder>`, and so no run among the others.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.adapt import Rule
from conf.schema.experiment import Engine, EngineKind, ExecutorKind, Experiment
from conf.schema.profile import Profile
from conf.visible import span
from launch.control.follow import tidy
from launch.control.stop import is_over, stop
from launch.files.records import Submitted
from launch.observe.look import observe
from launch.observe.observation import Observation

SAVE_S = 10
"""The least that executor.save_s may be: nothing is saved."""
END_S = 10.0
"""Jobs have left the queue by then, once their nodes are done."""
ANY_LENGTH = 10**9
"""Iterations: longer than any warm-up."""
LOOK_S = {ExecutorKind.local: 0.2, ExecutorKind.hosts: 0.5, ExecutorKind.slurm: 1.0}


def short_job(
    experiment: Experiment, folder: str, wait_min: float, run_min: int, gpu_interval_s: int = 0
) -> Experiment:
    """The same nodes and ranks for a job that waits `wait_min` for all of them and then lasts up to `run_min`.

    A short time limit lets Slurm's backfill start it early. GPUs are read every `gpu_interval_s`, if at all.
    """
    limit = math.ceil(wait_min) + run_min
    groups = {
        name: replace(group, time_min=min(limit, group.time_min or limit))
        for name, group in experiment.cluster.groups.items()
    }
    fixed = experiment.on_fixed_nodes()
    train = replace(fixed.train, best=None, max_cost=None, checkpoint=False, save_interval=None)
    return replace(
        without_goal(replace(fixed, train=train)),
        runs_dir=str(Path(experiment.runs_dir) / folder),
        cluster=replace(experiment.cluster, groups=groups),
        engine=Engine()
        if experiment.engine.kind is EngineKind.megatron_lm
        else experiment.engine,  # its script is not what such a job runs
        log=[],
        profile=Profile(timeline=False, gpu_interval_s=gpu_interval_s),
        executor=replace(experiment.executor, meet_min=wait_min, time_min=limit, save_s=SAVE_S),
    )


def without_goal(experiment: Experiment) -> Experiment:
    """The same of some length, for a plan that nobody trains: epochs would have to be counted."""
    train, adapt = experiment.train, experiment.adapt
    if train.in_epochs:
        train = train.with_intervals(dict.fromkeys(train.in_epochs, ANY_LENGTH))
        experiment = replace(experiment, train=train)
    if train.iterations is not None:
        return experiment
    samples = None if adapt.rule is Rule.none else ANY_LENGTH * experiment.parallel.global_batch_size
    return replace(experiment, train=replace(train, epochs=None, samples=samples, iterations=ANY_LENGTH))


def wait(run: RunDir, wait_min: float, run_min: int, longer: str, doing: Callable[[Observation], str]) -> str | None:
    """Waits until all nodes are done, telling on stderr for what; returns why it gave up, if it did.

    `longer` is the option for a longer wait. `doing` says what goes on once all nodes have started.
    """
    kind = _kind(run)
    begun = time.monotonic()
    before = ""
    while not (seen := observe(run)).over:
        absent = [node.name for node in seen.nodes if node.state == "absent" and node.unseen is None]
        now = _awaited(seen, absent) if absent else doing(seen)
        if now != before:
            print(f"{run.name}: {now}", file=sys.stderr, flush=True)
            before = now
        waited = time.monotonic() - begun
        if absent and waited > wait_min * 60:
            return f"the nodes did not start within {span(wait_min * 60)}: {now}; wait longer with {longer}"
        if waited > (wait_min + run_min) * 60:
            return f"the nodes had not finished after {span((wait_min + run_min) * 60)} and were stopped"
        time.sleep(LOOK_S[kind])
    return None


def _kind(run: RunDir) -> ExecutorKind:
    submitted = run.read(run.jobs, Submitted)
    return ExecutorKind.local if submitted is None else ExecutorKind(submitted.executor)


def end(run: RunDir) -> None:
    """Nothing of it is left. A node that does not answer any more keeps its job until that is cancelled."""
    kind = _kind(run)
    if kind is ExecutorKind.local:
        tidy(run)
        return
    until = time.monotonic() + END_S
    while not is_over(run):
        if time.monotonic() > until:
            print(f"stopping {run.name} …", file=sys.stderr, flush=True)
            stop(run)
        time.sleep(LOOK_S[kind])


def _awaited(seen: Observation, absent: Sequence[str]) -> str:
    pending = [str(job) for job in seen.jobs if job.state and job.state.pending]
    return f"waiting for {', '.join(absent)} to start" + (f": {', '.join(pending)}" if pending else "")
