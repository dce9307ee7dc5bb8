"""What is decided about the experiments of a command line, one or a sweep's, and starting them one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from conf.compose import read_experiment
from conf.errors import ClosedError, RunFolderError, TdppError
from conf.identity import identity
from conf.run_folder.run_files import read_text
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ExecutorKind, Experiment, Rehearse
from conf.visible import plural, rank_ranges
from launch.control.follow import finishing, follow, stop_if_active
from launch.control.planning.dry_run import DryRun, dry_run
from launch.control.planning.plan import code_digest
from launch.control.planning.predictions import doubts
from launch.control.submit import Sound, read_schedule, resume, start
from launch.errors import LaunchError
from launch.files.locks import owner_of
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.machine.provenance import Source, read_source
from launch.observe.look import observe
from launch.observe.observation import Observation
from launch.screen import agreed, can_be_asked, remark

T = TypeVar("T")
_SWEEP_WIDE = ("max_jobs", "confirm_gpu_hours", "yes", "sweep_metric")


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What a sweep is to try: some overrides, and what they gave."""

    overrides: tuple[str, ...]
    composed: Experiment | TdppError
    chosen: str | None = None
    """In words, the values that were left to tdpp."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a combination: a run, new or `skipped` because it was there already; a dry run; an error; or a dry
    run and the error with which a launch would end."""

    overrides: tuple[str, ...]
    run: RunDir | None = None
    skipped: bool = False
    dry_run: DryRun | None = None
    error: TdppError | None = None
    value: float | None = None
    """The value of the sweep's metric, once the run is over."""

    @property
    def started(self) -> RunDir | None:
        """The run, if it is new."""
        return None if self.skipped else self.run


def counts_as_done(seen: Observation) -> bool:
    """Whether a run need not be started again: it has succeeded, or is still in the queue or running. Raises
    LaunchError: nobody knows."""
    verdict = decide(seen)
    if verdict.state is State.unknown:
        raise LaunchError(f"skip_existing=true: it is unknown whether {seen.plan.run} still runs: {verdict.reason}")
    return verdict.state is State.succeeded or not seen.over


def lane(started: Sequence[T], max_jobs: int | None) -> Sequence[T]:
    """Returns those of the runs started so far that must have ended before the next one may start.

    Runs take turns in `max_jobs` lanes, and in a lane one follows the other. It waits for all before it, not only for
    the last: that one may be taken out of the queue while an earlier one is still running.
    """
    return () if max_jobs is None else started[len(started) % max_jobs :: max_jobs]


def gpu_hours(experiment: Experiment) -> float | None:
    """What a run on Slurm takes at most, unless it is started again; None if one of its jobs has no time limit.

    What runs without Slurm takes nothing of its accounts.
    """
    if experiment.executor.kind is not ExecutorKind.slurm:
        return 0.0
    if list(_without_limit(experiment)):
        return None
    groups = experiment.cluster.groups
    nodes = zip(experiment.node_order.groups, experiment.ranks_per_node(), strict=True)
    return sum(gpus * (groups[name].time_min or 0) / 60 for name, gpus in nodes if _has_gpus(experiment, name))


def _has_gpus(experiment: Experiment, group: str) -> bool:
    return not experiment.cluster.gpus[experiment.cluster.groups[group].gpu].is_cpu


def _without_limit(experiment: Experiment) -> Iterator[str]:
    """Keys of the time limits that are not set, of nodes with GPUs."""
    for name in dict.fromkeys(experiment.node_order.groups):
        if _has_gpus(experiment, name) and experiment.cluster.groups[name].time_min is None:
            yield f"cluster.groups.{name}.time_min"


def budget(experiments: Sequence[Experiment]) -> str | None:
    """The GPU-hours of all that is to be submitted, in words; None if no GPU of a cluster is taken."""
    hours = [gpu_hours(experiment) for experiment in experiments]
    known = [value for value in hours if value]
    unknown = hours.count(None)
    parts = []
    if known:
        parts.append(f"{plural(len(known), 'run')} of up to {_hours(sum(known))} (GPUs x time limit, without restarts)")
    if unknown:
        keys = ", ".join(dict.fromkeys(key for experiment in experiments for key in _without_limit(experiment)))
        parts.append(f"{plural(unknown, 'run')} of unknown GPU-hours, because no time limit is set ({keys})")
    return " and ".join(parts) or None


def must_confirm(experiments: Sequence[Experiment]) -> str | None:
    """Why somebody has to agree before these are submitted; None if nobody has to."""
    total = sum(gpu_hours(experiment) or 0.0 for experiment in experiments)
    if not experiments or experiments[0].yes or total <= experiments[0].confirm_gpu_hours:
        return None
    return f"up to {_hours(total)} exceed confirm_gpu_hours={experiments[0].confirm_gpu_hours:g}"


def check_sweep_wide(experiments: Sequence[Experiment]) -> None:
    """Raises LaunchError if a key that is for a sweep as a whole differs between its combinations."""
    for key in _SWEEP_WIDE:
        values = list(dict.fromkeys(getattr(experiment, key) for experiment in experiments))
        if len(values) > 1:
            given = ",".join("null" if value is None else str(value).lower() for value in values)
            raise LaunchError(f"{key}={given}: it applies to a sweep as a whole; give it one value")


def _hours(hours: float) -> str:
    return f"{hours:,.0f} GPU-hours" if hours >= 10 else f"{hours:.1f} GPU-hours"


Outcomes = dict[int, Outcome]
"""The outcomes by the number of the combination; those that are not settled yet are missing."""


def existing(experiment: Experiment) -> RunDir | None:
    """A run because of which this experiment need not be started, if that is wanted."""
    if not experiment.skip_existing:
        return None
    for run in RunDir.alike(Path(experiment.runs_dir), experiment.name, identity(experiment)):
        try:
            if _is_run_of(run, experiment) and counts_as_done(_observed(run)):
                return run
        except ClosedError as error:  # whether another user's run is the same nobody else can know
            print(f"skip_existing: {error}; this run is ignored", file=sys.stderr, flush=True)
        except (FileNotFoundError, RunFolderError):
            if RunDir.is_one(run.path):  # else somebody deletes it just now
                raise
    return None


def _observed(run: RunDir) -> Observation:
    """Raises ClosedError if this user may not read what would show how the run is, and RunFolderError as `observe`."""
    seen = observe(run)
    for fault in seen.faults:
        if fault.closed and fault.decisive:
            raise ClosedError(fault.text)
    return seen


def _is_run_of(run: RunDir, experiment: Experiment) -> bool:
    """The hash in a folder's name is short, and does not know what is in the files of a schedule and of a module."""
    code = code_digest(experiment.model)
    if code is not None and not (run.plan.is_file() and run.read_plan().model.code_digest == code):
        return False
    own = experiment.parallel.schedule_file
    if own is not None and read_text(run.schedule) != read_schedule(own):
        return False
    return identity(read_experiment(run.config)) == identity(experiment)


def confirm(experiments: Sequence[Experiment]) -> None:
    """Tells the GPU-hours of all that is to be submitted; asks for consent where they are many. Raises LaunchError:
    consent is refused, or nobody is there to give it."""
    hours = budget(experiments)
    if hours is not None:
        print(hours, file=sys.stderr, flush=True)
    reason = must_confirm([experiment for experiment in experiments if not experiment.dry_run])
    if reason is None:
        return
    if not can_be_asked():
        raise LaunchError(
            f"{reason}: nothing was submitted; confirm with yes=true, raise confirm_gpu_hours, or lower the time "
            f"limits (cluster.groups.<group>.time_min)"
        )
    if not agreed(f"{reason}; submit?"):
        raise LaunchError("not confirmed: nothing was submitted")


def start_all(
    combinations: Sequence[Combination],
    wanted: Mapping[int, Experiment],
    outcomes: Outcomes,
    worker: str,
    sound: Sound | None = None,
    waits: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Starts them in order; a run on this machine is followed to its end before the next one, if that is wanted.

    With `waits`, a run on Slurm starts when those of the combinations with these numbers have ended. With `sound`,
    which checks a checkpoint, one of which there is a run that ended early goes on from its newest one.

    A run that is being submitted when Ctrl-C comes is first submitted and noted.
    """
    source: Source | None = None
    jobs: dict[int, tuple[str, ...]] = {}
    for number, experiment in wanted.items():
        overrides = combinations[number].overrides
        before = lane([*jobs], experiment.max_jobs) if waits is None else waits.get(number, ())
        behind = [job for one in before for job in jobs.get(one, ())]
        if experiment.dry_run:
            before = sorted([*jobs].index(one) + 1 for one in before if one in jobs)
            behind = [f"<jobs of {'runs' if len(before) > 1 else 'run'} {rank_ranges(before)}>"] if before else []
            shown = dry_run(experiment, worker, behind)
            outcomes[number] = replace(outcomes.get(number, Outcome(overrides=overrides)), dry_run=shown)
            jobs[number] = ()
            continue
        source = source or read_source()
        is_followed = experiment.executor.followed
        try:
            with finishing():
                outcomes[number] = _started(experiment, overrides, worker, source, behind, sound)
            run = outcomes[number].started
            if run is None:
                continue
            print(f"run {run.path}", file=sys.stderr, flush=True)
            if experiment.executor.kind is ExecutorKind.slurm:
                jobs[number] = tuple(job["id"] for job in run.read_json(run.jobs)["jobs"])
            if is_followed:
                follow(run)
                source = None  # it may have changed meanwhile
        except KeyboardInterrupt:
            if is_followed and number in outcomes and (run := outcomes[number].started) is not None:
                stop_if_active(run)
            raise


def _started(
    experiment: Experiment,
    overrides: tuple[str, ...],
    worker: str,
    source: Source,
    behind: Sequence[str],
    sound: Sound | None,
) -> Outcome:
    try:
        run = existing(experiment)  # once more: it may be the same as a combination before it
        if run is not None:
            return Outcome(overrides=overrides, run=run, skipped=True)
        remark(*(doubts(experiment) if experiment.executor.rehearse is not Rehearse.none else ()))
        if sound is not None and not behind and (early := _ended_early(experiment)) is not None:
            resume(early, worker, sound)
            return Outcome(overrides=overrides, run=early)
        return Outcome(overrides=overrides, run=start(experiment, overrides, worker, source, behind))
    except TdppError as error:
        return Outcome(overrides=overrides, error=error)


def _ended_early(experiment: Experiment) -> RunDir | None:
    """The user's newest run of this experiment that can go on from a checkpoint."""
    alike = RunDir.alike(Path(experiment.runs_dir), experiment.name, identity(experiment))
    for run in alike:
        with suppress(ClosedError, FileNotFoundError, RunFolderError):
            own = owner_of(run) == os.geteuid()
            if own and _is_run_of(run, experiment) and run.read_plan().resumable and run.latest_checkpoint.exists():
                return run
    return None
