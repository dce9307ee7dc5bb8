"""Runs on a Slurm cluster: one task per node of each job, all of them node agents; and which nodes take jobs now."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from conf.run_folder.rundir import RunDir
from conf.schema.adapt import NOW
from conf.schema.experiment import Experiment, RunsMode
from conf.schema.values.sbatch import EXCLUDE, KEYS
from conf.visible import plural
from launch.control.executors.sbatch import Component, JobRequest, Submission, job_requests, sbatch_text
from launch.errors import LaunchError
from launch.files.locks import owner_of
from launch.files.records import Start
from launch.machine import slurm_commands
from launch.machine.job_states import expanded
from launch.machine.provenance import path_of_agents
from launch.machine.sinfo import EXCLUDED, RESERVED, Gres, Membership, parse, parse_gres
from launch.machine.slurm_commands import SlurmSilent
from launch.node.settings import NodeSettings
from launch.screen import some
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan import Plan

MakeSettings = Callable[[JobRequest], NodeSettings]
"""What the agents of a job are to do."""


def check(experiment: Experiment, environment: Mapping[str, str]) -> None:
    """Raises LaunchError for what Slurm could not run, as far as that is known without asking it."""
    job = environment.get("SLURM_JOB_ID")
    if job is not None and not experiment.dry_run:
        raise LaunchError(
            f"SLURM_JOB_ID={job}: this shell is inside a Slurm allocation, and a submission would inherit its limits; "
            f"submit from a login node (if this is one, unset the SLURM_ variables)"
        )
    if shutil.which("sbatch") is None and not experiment.dry_run:
        raise LaunchError(
            "executor.kind=slurm: sbatch is not on this machine; use a login node of the cluster, or executor=local "
            "(dry_run=true shows any plan anywhere)"
        )
    path = str(Path(experiment.runs_dir).absolute() / experiment.name)
    if "\\" in path or not path.isprintable():
        raise LaunchError(
            f"runs_dir={experiment.runs_dir!r}, name={experiment.name!r}: {path!r} contains a backslash, a line break "
            f"or another control character, which Slurm does not accept in file names; choose a path without it"
        )


def submission_of(
    experiment: Experiment,
    run: Path,
    token: str,
    resumable: bool,
    behind: Sequence[str] = (),
    after: Sequence[str] = (),
    number: int = 0,
) -> Submission:
    """What the jobs of a run have in common.

    Args:
        token: what tells it from all others.
        resumable: whether it saves what a later start goes on from.
        behind: ids of jobs that must have ended before it starts.
        after: ids of those that must have ended well.
        number: how often the run was submitted before.
    """
    return Submission(
        name=experiment.name,
        comment=slurm_commands.comment_of(token),
        python=sys.executable,
        folder=RunDir(run).submitit,
        path=path_of_agents(),
        number=number,
        save_s=experiment.executor.save_s,
        requeue=resumable and not experiment.elastic.enabled,
        keep=experiment.elastic.enabled,
        group=experiment.runs_mode is RunsMode.group,
        mail=experiment.notify.mail,
        behind=tuple(behind),
        after=tuple(after),
    )


def start(experiment: Experiment, run: RunDir, submission: Submission, settings: MakeSettings) -> None:
    """Submits the run's jobs; jobs.json and sbatch/ then name and hold them. Returns at once.

    If the run is stopped meanwhile, none of them is left.

    Slurm is asked about all of them first, so that nothing is submitted if one cannot be.

    Raises:
        LaunchError: Slurm refuses one, or does not answer. What was submitted already is taken back.
    """
    plan = run.read_plan()
    later = later_nodes(experiment, plan)
    requests = job_requests(experiment, {*range(len(plan.nodes))} - {*later})
    run.sbatch.mkdir(exist_ok=True)
    starts = [ask(submission, request, run.sbatch) for request in requests]
    estimate = {"submitted_unix": time.time(), "expected_unix": max(filter(None, starts), default=None)}
    slurm_commands.end(submission.comment, owner_of(run))  # what an earlier start may have left waiting
    try:
        _submit_all(run, requests, submission, settings, estimate)
        if submission.keep:
            _prepare_joins(experiment, run, submission, settings, later)
    except BaseException:  # Ctrl-C too
        slurm_commands.end(submission.comment, owner_of(run))
        raise
    if run.stop_request.exists():  # it may have come when not all of the jobs were in the queue
        slurm_commands.end(submission.comment, owner_of(run))


def ask(submission: Submission, request: JobRequest, folder: Path) -> float | None:
    """Asks Slurm whether it would take a job; its script is left in a folder, and nothing is submitted.

    Returns:
        When Slurm expects to start it, in seconds since 1970; None where it does not say.

    Raises:
        LaunchError: it would not, or does not answer; the message names the nodes that are missing, or else the keys
            that it may be about.
    """
    script = folder / f"{request.role}.sh"
    write_atomic(script, sbatch_text(submission, request, after=None))
    try:
        return slurm_commands.test(str(script))
    except SlurmSilent as error:
        raise LaunchError(
            f"Slurm does not answer, so nothing was submitted: {error}; try again once 'scontrol ping' says that "
            f"slurmctld is UP"
        ) from error
    except LaunchError as error:
        if slurm_commands.NODES_UNAVAILABLE in str(error) and (missing := _missing_nodes(request)):
            raise LaunchError(missing) from error
        raise LaunchError(f"{requested(request)}: Slurm would refuse this job: {error}") from error


def _missing_nodes(request: JobRequest) -> str:
    """Which nodes a job lacks, and how to go on; empty where that is not why Slurm refuses it."""
    try:
        rows = parse(slurm_commands.nodes())
    except LaunchError:
        return ""
    found = shortages([(component, len(component.nodes)) for component in request.components], rows)
    return "; ".join(f"{one}, and {plural(one.wanted, 'node')} needed: {one.way_out}" for one in found)


def _submit_all(
    run: RunDir,
    requests: Sequence[JobRequest],
    submission: Submission,
    settings: MakeSettings,
    estimate: Mapping[str, float | None],
) -> None:
    jobs: list[dict[str, Any]] = []

    def write(*entries: dict[str, Any]) -> None:
        run.write_json(run.jobs, {**run.read_json(run.jobs), **estimate, "jobs": list(entries)})

    for request in requests:
        if run.stop_request.exists():
            return
        script = run.sbatch / f"{request.role}.sh"
        write_atomic(script, sbatch_text(submission, request, after=jobs[0]["id"] if jobs else None))
        write_atomic(run.agent(submission.number, request.role), settings(request).to_json())
        entry = {"role": request.role, "nodes": list(request.nodes)}
        write(*jobs, {"id": None, **entry})  # first: if this process is killed now, the job's comment leads to its id
        jobs.append({"id": _submit(run, script), **entry})
        write(*jobs)
    for submitted in jobs:  # now that none of them can be refused: links to a run that is taken back would stay
        run.link_job(submitted["id"])
    for request, submitted in zip(requests, jobs, strict=True):  # Slurm numbers components one after the other
        for number in range(1, len(request.components) if submitted["id"].isdecimal() else 0):
            run.link_job(str(int(submitted["id"]) + number))


def later_nodes(experiment: Experiment, plan: Plan) -> list[int]:
    """The nodes, by node rank, for each of which a job of its own waits, because Slurm has not enough free ones."""
    return [rank for rank in range(len(plan.nodes)) if experiment.elastic.start == NOW and rank not in plan.used]


def join_scripts(experiment: Experiment, submission: Submission, names: Sequence[str]) -> Iterator[JoinScript]:
    """The jobs by which each node of an elastic run joins it, by itself; `names` are by node rank."""
    alone = replace(submission, behind=(), after=(), mail=None)
    for request in job_requests(experiment):
        for part in request.components:
            for rank in part.nodes:
                own = JobRequest(role=f"join-{names[rank]}", components=(replace(part, nodes=(rank,)),))
                yield JoinScript(node=rank, request=own, text=sbatch_text(alone, own, after=None))


@dataclass(frozen=True, kw_only=True)
class JoinScript:
    """A job of one node, by its node rank."""

    node: int
    request: JobRequest
    text: str


def _prepare_joins(
    experiment: Experiment, run: RunDir, submission: Submission, settings: MakeSettings, later: Collection[int]
) -> None:
    """Writes for each node the job by which it joins the run when it has been lost, and submits those of the nodes that
    come later."""
    names = run.read_plan().node_names
    for join in join_scripts(experiment, submission, names):
        write_atomic(run.join_script(submission.number, names[join.node]), join.text)
        write_atomic(run.agent(submission.number, join.request.role), settings(join.request).to_json())
    for rank in later:
        start = str(Start(submission.number, 0))
        job = slurm_commands.submit(str(run.join_script(submission.number, names[rank])))
        run.joins.mkdir(exist_ok=True)
        record = {"id": job, "node": rank, "start": start, "unix": time.time()}
        run.write_json(run.join(start, names[rank]), record)


def requested(request: JobRequest) -> str:
    """The keys that an answer of Slurm may be about."""
    return "; ".join(
        f"cluster.groups.{part.group}: {plural(len(part.nodes), 'node')}"
        + "".join(f", {key}={value}" for key in KEYS.values() if (value := getattr(part.asked, key)) is not None)
        + "".join(f", sbatch.{name}={value}" for name, value in part.sbatch.items())
        for part in request.components
    )


def _submit(run: RunDir, script: Path) -> str:
    """Submits a script and keeps a copy by the job's id, since a later start writes another one; returns the id."""
    # A Ctrl-C that comes meanwhile waits: nobody else would learn the job's id.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        job = slurm_commands.submit(str(script))
        shutil.copyfile(script, run.submitit / f"{job}_submission.sh")
        return job
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


MOST_NAMES = 4
"""How many nodes in one state are named."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Too few nodes of a group take jobs now."""

    group: str
    wanted: int
    usable: int
    fitting: int
    """Nodes that sinfo lists and that a job of the group could have, in whatever state."""
    absent: str
    """The others, such as `gpu2-002 is down`; empty where there never were enough."""
    states: frozenset[str]
    """What the absent ones are, such as `down`."""

    def __str__(self) -> str:
        return f"{self.group}: {self.usable} of {self.fitting} usable" + (f", {self.absent}" if self.absent else "")

    @property
    def way_out(self) -> str:
        """What to do before a job is submitted."""
        if self.usable == 0:
            fewer = f"leave {self.group} out of the cluster and of the plan (parallel.node_order)"
        else:
            count = f"cluster.groups.{self.group}.count={self.usable}"
            fewer = f"go on with {count} (a launch needs a plan for it: 'tdpp search … {count} plan=NAME' writes one)"
        if not self.absent:
            return f"there are no more such nodes; {fewer}"
        if self.states == {EXCLUDED}:
            return f"exclude fewer nodes (cluster.exclude), or {fewer}"
        asked = "scontrol show reservation" if self.states <= RESERVED else "sinfo -R"
        return f"wait for them ('{asked}' says more), or {fewer}"


def shortages(wanted: Iterable[tuple[Component, int]], rows: Sequence[Membership]) -> list[Shortage]:
    """Lists the components that have fewer nodes than each needs, of what sinfo lists. A component that no
    listed node fits is not among them: what is wrong with it, Slurm knows better."""
    found = []
    for component, count in wanted:
        excluded = expanded(component.sbatch.get(EXCLUDE, ""))
        fitting = [replace(row, excluded=row.node in excluded) for row in rows if _fits(row, component)]
        usable = sum(row.usable for row in fitting)
        if fitting and usable < count:
            found.append(
                Shortage(
                    group=component.group,
                    wanted=count,
                    usable=usable,
                    fitting=len(fitting),
                    absent=_absent(fitting),
                    states=frozenset(row.hindrance for row in fitting if row.hindrance is not None),
                )
            )
    return found


def _absent(rows: Sequence[Membership]) -> str:
    """`gpu2-002, gpu2-003 are down, gpu2-007 is reserved`."""
    absent = sorted((str(row.hindrance), row.node) for row in rows if not row.usable)
    parts = []
    for why, pairs in groupby(absent, key=lambda pair: pair[0]):
        names = [name for _, name in pairs]
        parts.append(f"{some(names, MOST_NAMES)} {'is' if len(names) == 1 else 'are'} {why}")
    return ", ".join(parts)


def _fits(row: Membership, component: Component) -> bool:
    """Whether a job of the component may run on the node once it is up."""
    asked = component.asked
    in_partition = row.default if asked.partition is None else row.partition in asked.partition.split(",")
    return (
        in_partition
        and row.cpus >= (asked.cpus_per_task or 0)
        and all(_has(row.gres, gres) for gres in parse_gres(asked.gres or ""))
        and _satisfies(row.features, asked.constraint)
    )


def _has(there: Sequence[Gres], asked: Gres) -> bool:
    return asked.count <= sum(gres.count for gres in there if asked.type in (None, gres.type))


def _satisfies(features: frozenset[str], constraint: str | None) -> bool:
    """Tells whether features fit `a&b` and `a|b`; what else Slurm understands is taken to fit."""
    if constraint is None or not re.fullmatch(r"[\w.-]+([&|][\w.-]+)*", constraint):
        return True
    return any(features.issuperset(words.split("&")) for words in constraint.split("|"))
