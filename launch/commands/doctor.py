"""`tdpp doctor`: whether an experiment could be launched, found out with a short job on its own nodes.

The job goes the way of every launch (plan, executor, container, node agents), but its workers are megatron_ext.doctor.
It has a folder of its own below `<runs_dir>/doctor`, and is not a run among the others.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from conf.compose import compose_unchecked
from conf.errors import TdppError
from conf.reading.parser import Parser, option
from conf.reading.values import above_0
from conf.run_folder.gpu_lines import entries
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment, Rehearse
from conf.visible import plural
from launch.commands.launching.preflight import Preflight, preflight
from launch.commands.launching.resolve_auto import resolve_auto
from launch.control.follow import interruptible, stopped_if_interrupted
from launch.control.planning.dry_run import dry_run
from launch.control.short_job import end, short_job, wait
from launch.control.stop import stop
from launch.control.submit import submit
from launch.doctor.findings import Check, Level, read_findings
from launch.doctor.judge import Case, judge
from launch.doctor.login import HERE, jobs_check, login_checks
from launch.errors import LaunchError
from launch.files.run_files import agent_logs, read_submitted
from launch.history.hosts import Health, Host, hosts_of
from launch.history.ledger import announcement, records
from launch.history.record import driver_of
from launch.judge.node_reports import last_words
from launch.observe.look import observe
from launch.observe.observation import Job, Observation, SeenNode
from launch.screen import print_table, remark

WORKER = "megatron_ext.doctor"
FOLDER = "doctor"
"""In `runs_dir`."""
WAIT_MIN = 10
RUN_MIN = 5
"""The nodes are done by then, once they are all there: megatron_ext.doctor bounds all that it does."""
GPU_INTERVAL_S = 1
"""Between readings of GPUs: the job lasts some seconds."""


def main(argv: Sequence[str], *, preflight: Preflight = preflight, worker: str = WORKER) -> int:
    """Runs `tdpp doctor <argv>`; returns 0 if no check found an error, else 1.

    Raises:
        TdppError: the configuration cannot be composed.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP; the job has been ended.
    """
    arguments = parser().parse_intermixed_args(argv)
    arguments.overrides += [f"--config-dir={folder}" for folder in arguments.config_dir]
    experiment = _experiment(arguments.overrides)
    checkup = short_job(experiment, FOLDER, arguments.wait_min, RUN_MIN, GPU_INTERVAL_S)
    if experiment.dry_run:
        print(dry_run(checkup, worker).readable())
        return 0
    checks = list(login_checks(experiment, data_check(experiment, preflight)))
    checks.append(jobs_check(checkup))
    path: Path | None = None
    if not any(
        check.level is Level.error and check.what in ("runs_dir", "slurm", "processes", "hosts") for check in checks
    ):
        with interruptible():
            path, found = _examine(experiment, checkup, arguments.overrides, arguments.wait_min, worker)
        checks += found
    _print_checks(checks, path, arguments.json)
    return int(any(check.level is Level.error for check in checks))


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="tdpp doctor",
        description="Check the machines of an experiment with a short job on them. Takes the same GROUP=CHOICE and "
        "KEY=VALUE words as 'tdpp launch'; dry_run=true prints what would be submitted.",
    )
    made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="as for 'tdpp launch'")
    made.add_argument("-cd", "--config-dir", metavar="DIR", action="append", default=[], help="as for 'tdpp launch'")
    made.add_argument(
        "--wait-min",
        metavar="N",
        type=option(above_0),
        default=WAIT_MIN,
        help="give up if not all nodes have started after N minutes (default: %(default)s)",
    )
    made.add_argument("--json", action="store_true", help="print the checks as one JSON object")
    return made


def _experiment(overrides: Sequence[str]) -> Experiment:
    experiment, chosen = resolve_auto(compose_unchecked(overrides))
    remark(chosen)
    if experiment.executor.rehearse is not Rehearse.none:
        raise LaunchError(
            f"executor.rehearse={experiment.executor.rehearse}: a rehearsal runs on this machine alone, so there is "
            f"nothing to check; leave it out"
        )
    return experiment


def data_check(experiment: Experiment, preflight: Preflight) -> Check:
    try:
        doubts = preflight(experiment)
    except TdppError as error:
        return Check(Level.error, HERE, "data", str(error))
    fine = f"{experiment.data.prefix} suits model {experiment.model.name}"
    return Check(Level.warning if doubts else Level.ok, HERE, "data", "; ".join(doubts) or fine)


def _examine(
    experiment: Experiment, checkup: Experiment, overrides: Sequence[str], wait_min: float, worker: str
) -> tuple[Path | None, list[Check]]:
    """Submits the job, waits for its end and judges what it found; the folder, if it came to that."""
    try:
        run = submit(checkup, overrides, worker, for_itself=True)
    except TdppError as error:
        return None, [Check(Level.error, HERE, "jobs", str(error))]

    def examining(seen: Observation) -> str:
        return f"examining {plural(len(seen.nodes), 'node')}"

    checks = []
    with stopped_if_interrupted(run):
        given_up = wait(run, wait_min, RUN_MIN, "--wait-min", examining)
        if given_up is not None:
            stop(run)
        seen = observe(run)
        end(run)
    if given_up is not None:
        checks.append(Check(Level.error, HERE, "jobs", given_up))
    plan = run.read_plan()
    groups = tuple(node.group for node in plan.nodes)
    case = Case(
        experiment=experiment,
        groups=groups,
        cuda=plan.device == "cuda",
        nodes=read_findings(run),
        readings={node.name: entries(_text(run.node_gpu(node.name))) for node in plan.nodes},
        lost=_lost(run, seen),
        images={node.name: node.image for node in seen.nodes if node.image is not None},
        unseen=tuple(
            (group, node.name, node.unseen) for group, node in zip(groups, seen.nodes, strict=True) if node.unseen
        ),
    )
    runs = Path(experiment.runs_dir)
    examined = [
        (place.group, node.host, driver_of(run, node.name)) for place, node in zip(plan.nodes, seen.nodes, strict=True)
    ]
    return run.path, checks + judge(case) + list(from_history(hosts_of(records(runs, announcement(runs))), examined))


def from_history(hosts: Sequence[Host], examined: Sequence[tuple[str, str | None, str | None]]) -> Iterator[Check]:
    """What earlier runs say of the hosts that are examined now: of each its group, its name and its GPUs' driver."""
    known = {name: host for host in hosts for name in (*host.before, host.name)}
    names = {host.name for _, name, _ in examined if (host := known.get(name or "")) is not None}
    for group, name, driver in examined:
        host = known.get(name or "")
        if host is None:
            continue
        found = []
        if host.health is not Health.healthy:
            found.append(f"{name} is {host.health} by earlier runs: {host.why}; cluster.exclude=[auto] leaves it out")
        if driver is not None and host.driver is not None and driver != host.driver[0]:
            found.append(
                f"{name} has driver {driver}, and had {host.driver[0]} in {host.driver[1]}: times of earlier runs and "
                f"profiles may not hold ('tdpp profile' measures them again)"
            )
        found += [f"{host.name} - {other}: {why}" for other, why in host.links.items() if other in names]
        yield from (Check(Level.warning, group, "history", text) for text in found)


def _lost(run: RunDir, seen: Observation) -> dict[str, dict[str, str]]:
    """Says why nodes wrote nothing, or ended before they had written all; by group and node."""
    logs = agent_logs(run, seen.plan, read_submitted(run, len(seen.nodes)))
    lost: dict[str, dict[str, str]] = {}
    for place, node in zip(seen.plan.nodes, seen.nodes, strict=True):
        job = seen.job_of(node)
        words = [path for source in (node.name, f"job {node.job}") for path in logs.get(source, [])]
        wrote = run.doctor_node(node.name).exists()
        why = _why_lost(node, job, wrote, seen.stop_unix is not None, [run.node_err(node.name)], words)
        if why is not None:
            lost.setdefault(place.group, {})[node.name] = why
    return lost


def _why_lost(
    node: SeenNode, job: Job | None, wrote: bool, given_up: bool, of_worker: list[Path], of_agent: list[Path]
) -> str | None:
    """None for a node that wrote all, or ended early only because of others. The last two are what was printed."""
    if node.ended and node.exit_code == 0:
        return None
    if node.unseen is not None:
        return "did not start"
    if given_up and node.state == "absent":
        return "did not start in time"
    state = f": {job}" if job is not None and job.over else ""
    if node.ended and node.stopped and not node.reason and not given_up:
        return f"was ended from outside by {node.stopped}{state}"
    if node.ended and not node.stopped and not node.reason:
        return f"its worker exited with {node.exit_code}{_last_words(of_worker)}"
    if wrote and node.ended:
        return None
    return node.reason or f"reported nothing{state}{_last_words(of_agent)}"


def _last_words(paths: Sequence[Path]) -> str:
    """The last line that says why, to be put behind what happened; empty if there is none."""
    line = last_words("\n".join(map(_text, paths)))
    return f": {line}" if line else ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _print_checks(checks: Sequence[Check], path: Path | None, as_json: bool) -> None:
    if as_json:
        folder = None if path is None else str(path)
        print(json.dumps({"path": folder, "checks": [asdict(check) for check in checks]}))
        return
    print_table(
        ("", "where", "check", "found"), [[check.level, check.where, check.what, check.text] for check in checks]
    )
    counts = Counter(check.level for check in checks)
    bad = [plural(counts[level], level) for level in (Level.error, Level.warning) if counts[level]]
    print(" and ".join(bad) or "everything is fine")
