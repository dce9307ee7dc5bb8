"""`tdpp doctor`: whether an experiment could be launched, found out with a short job on its own nodes.

The job goes the way of every launch (plan, executor, container, node agents), but its workers are megatron_ext.doctor.
It has a folder of its own below `<runs_dir>/doctor`, and is no run among the others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.compose import compose
from conf.errors import TdppError
from conf.rundir import RunDir
from conf.schema import Engine, ExecutorKind, Experiment, Rehearse
from launch.agent_logs import agent_logs
from launch.app import hydra_message
from launch.checks import Check, Level
from launch.doctor_findings import read_findings
from launch.doctor_judge import Case, judge
from launch.doctor_login import HERE, jobs_check, login_checks
from launch.dry_run import dry_run_text
from launch.errors import LaunchError
from launch.follow import interruptible, stopped_if_interrupted, tidy
from launch.observe import Job, Node, Observation, observe
from launch.stop import is_over, stop
from launch.submit import Preflight, submit
from launch.table import print_table

WORKER = "megatron_ext.doctor"
FOLDER = "doctor"
"""In `runs_dir`."""
WAIT_MIN = 10
RUN_MIN = 5
"""The nodes are done by then, once they are all there: megatron_ext.doctor bounds all that it does."""
SAVE_S = 10
"""The least that executor.save_s may be: nothing is saved."""
END_S = 10.0
"""Jobs have left the queue by then, once their nodes are done."""
LOOK_S = {ExecutorKind.local: 0.2, ExecutorKind.slurm: 1.0}


def main(argv: Sequence[str], *, preflight: Preflight, worker: str = WORKER) -> int:
    """Runs `tdpp doctor <argv>`; returns 0 if no check found an error, else 1.

    Raises:
        TdppError: the configuration cannot be composed.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP; the job has been ended.
    """
    arguments = _parser().parse_intermixed_args(argv)
    experiment = _experiment(arguments.overrides)
    checkup = as_checkup(experiment, arguments.wait_min)
    if experiment.dry_run:
        print(dry_run_text(checkup, worker))
        return 0
    checks = list(login_checks(experiment, preflight))
    checks.append(jobs_check(checkup))
    path: Path | None = None
    if not any(check.level is Level.error and check.what in ("runs_dir", "slurm", "processes") for check in checks):
        with interruptible():
            path, found = _examine(experiment, checkup, arguments.overrides, arguments.wait_min, worker)
        checks += found
    _tell(checks, path, arguments.json)
    return int(any(check.level is Level.error for check in checks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tdpp doctor",
        description="Check the machines that an experiment would run on, with a short job on them. Takes what "
        "'tdpp launch' takes; dry_run=true prints what would be submitted.",
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="as for 'tdpp launch'")
    parser.add_argument(
        "--wait-min",
        metavar="N",
        type=_minutes,
        default=WAIT_MIN,
        help="give up when not all nodes have started after so many minutes (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="the checks as one JSON object")
    return parser


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return minutes


def _experiment(overrides: Sequence[str]) -> Experiment:
    try:
        experiment = compose(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise LaunchError(hydra_message(error)) from error
    if experiment.executor.rehearse is not Rehearse.none:
        raise LaunchError(
            f"executor.rehearse={experiment.executor.rehearse}: a rehearsal runs on this machine alone, and there is "
            "nothing to check; leave it out"
        )
    return experiment


def as_checkup(experiment: Experiment, wait_min: float) -> Experiment:
    """The same nodes and ranks for a short job that trains nothing and saves nothing.

    A short time limit lets Slurm's backfill start it early.
    """
    limit = math.ceil(wait_min) + RUN_MIN
    groups = {
        name: replace(group, time_min=min(limit, group.time_min or limit))
        for name, group in experiment.cluster.groups.items()
    }
    return replace(
        experiment,
        runs_dir=str(Path(experiment.runs_dir) / FOLDER),
        cluster=replace(experiment.cluster, groups=groups),
        engine=Engine(),
        train=replace(experiment.train, checkpoint=False, save_interval=None),
        profile=replace(experiment.profile, timeline=False, nsys=False, ncu=False, gpu_interval_s=0),
        executor=replace(experiment.executor, meet_min=wait_min, time_min=limit, save_s=SAVE_S),
    )


def _examine(
    experiment: Experiment, checkup: Experiment, overrides: Sequence[str], wait_min: float, worker: str
) -> tuple[Path | None, list[Check]]:
    """Submits the job, waits for its end and judges what it found; the folder, if it came to that."""
    try:
        run = submit(checkup, overrides, _no_data_needed, worker)
    except TdppError as error:
        return None, [Check(level=Level.error, where=HERE, what="jobs", text=str(error))]
    checks = []
    with stopped_if_interrupted(run):
        given_up = _wait(run, checkup.executor.kind, wait_min)
        if given_up is not None:
            stop(run)
        seen = observe(run)
        _end(run)
    if given_up is not None:
        checks.append(Check(level=Level.error, where=HERE, what="jobs", text=given_up))
    plan = run.read_json(run.plan)
    case = Case(
        experiment=experiment,
        groups=tuple(node["group"] for node in plan["nodes"]),
        cuda=plan["device"] == "cuda",
        nodes=read_findings(run),
        lost=_lost(run, seen),
    )
    return run.path, checks + judge(case)


def _no_data_needed(_experiment: Experiment) -> None:
    """In place of the check of the data, which has been made: what the nodes find is worth knowing all the same."""


def _wait(run: RunDir, kind: ExecutorKind, wait_min: float) -> str | None:
    """Waits until all nodes are done, telling on stderr for what; returns why it gave up, if it did."""
    begun = time.monotonic()
    told = ""
    while not (seen := observe(run)).over:
        absent = [node.name for node in seen.nodes if node.state == "absent"]
        doing = _awaited(seen, absent) if absent else f"examining {len(seen.nodes)} node{'s' * (len(seen.nodes) > 1)}"
        if doing != told:
            print(f"{run.name}: {doing}", file=sys.stderr, flush=True)
            told = doing
        waited = time.monotonic() - begun
        if absent and waited > wait_min * 60:
            return f"nodes did not start within {wait_min:g} minutes: {doing}; wait longer with --wait-min"
        if waited > (wait_min + RUN_MIN) * 60:
            return f"the nodes were not done after {wait_min + RUN_MIN:g} minutes, and were stopped"
        time.sleep(LOOK_S[kind])
    return None


def _awaited(seen: Observation, absent: Sequence[str]) -> str:
    pending = [str(job) for job in seen.jobs if job.state and job.state.pending]
    return f"waiting for {', '.join(absent)} to start" + (f": {', '.join(pending)}" if pending else "")


def _end(run: RunDir) -> None:
    """Nothing of it is left. A node that does not answer any more keeps its job until that is cancelled."""
    jobs = run.read_json(run.jobs)
    if jobs["executor"] == ExecutorKind.local:
        tidy(run)
        return
    until = time.monotonic() + END_S
    while not is_over(run):
        if time.monotonic() > until:
            print(f"stopping {run.name} …", file=sys.stderr, flush=True)
            stop(run)
        time.sleep(LOOK_S[ExecutorKind.slurm])


def _lost(run: RunDir, seen: Observation) -> dict[str, dict[str, str]]:
    """By group and node, why nodes told nothing, or ended before they had told all."""
    logs = agent_logs(run, seen.plan, run.read_json(run.jobs)["jobs"])
    lost: dict[str, dict[str, str]] = {}
    for place, node in zip(seen.plan["nodes"], seen.nodes, strict=True):
        job = seen.job_of(node)
        words = [path for source in (node.name, f"job {node.job}") for path in logs.get(source, [])]
        told = run.doctor_node(node.name).exists()
        why = _why_lost(node, job, told, seen.stop_unix is not None, [run.node_err(node.name)], words)
        if why is not None:
            lost.setdefault(place["group"], {})[node.name] = why
    return lost


def _why_lost(
    node: Node, job: Job | None, told: bool, given_up: bool, of_worker: list[Path], of_agent: list[Path]
) -> str | None:
    """None for a node that told all, or ended early only because of others. The last two are what was printed."""
    if node.ended and node.exit_code == 0:
        return None
    if given_up and node.state == "absent":
        return "did not start in time"
    state = f": {job}" if job is not None and job.over else ""
    if node.ended and node.stopped and not node.reason and not given_up:
        return f"was ended by {node.stopped} from outside{state}"
    if node.ended and not node.stopped and not node.reason:
        return f"its worker ended with {node.exit_code}{_last_words(of_worker)}"
    if told and node.ended:
        return None
    return node.reason or f"told nothing{state}{_last_words(of_agent)}"


def _last_words(paths: Sequence[Path]) -> str:
    """The last line, to be put behind what happened; empty if there is none."""
    lines = [
        line.strip()
        for path in paths
        if path.exists()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return next((f": {line}" for line in reversed(lines) if line), "")


def _tell(checks: Sequence[Check], path: Path | None, as_json: bool) -> None:
    if as_json:
        folder = None if path is None else str(path)
        print(json.dumps({"path": folder, "checks": [asdict(check) for check in checks]}))
        return
    print_table(
        ("", "where", "check", "found"), [[check.level, check.where, check.what, check.text] for check in checks]
    )
    counts = [_count(checks, level) for level in (Level.error, Level.warning)]
    print(" and ".join(filter(None, counts)) or "all well")


def _count(checks: Sequence[Check], level: Level) -> str:
    count = sum(check.level is level for check in checks)
    return f"{count} {level}{'s' * (count > 1)}" if count else ""
