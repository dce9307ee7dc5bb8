"""Starting what a sweep has composed, one by one, once that was agreed to."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conf.compose import read_experiment
from conf.errors import ClosedError, RunFolderError, TdppError
from conf.identity import identity
from conf.run_folder.rank_ranges import rank_ranges
from conf.run_folder.run_files import read_text
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ExecutorKind, Experiment, Rehearse
from launch.control.follow import finishing, follow, give_up
from launch.control.planning.dry_run import dry_run
from launch.control.planning.plan import code_digest
from launch.control.planning.rehearsal import doubts
from launch.control.submit import read_schedule, start
from launch.errors import LaunchError
from launch.machine.provenance import Source, read_source
from launch.observe.look import observe
from launch.observe.observation import Observation
from launch.screen.consent import agreed, can_be_asked
from launch.sweep.combinations import Combination, Outcome, budget, counts_as_done, lane, must_confirm

Outcomes = dict[int, Outcome]
"""By the number of the combination; those that are not settled yet are missing."""


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
    """Tells the GPU-hours of all that is to be submitted; asks for consent where they are many.

    Raises:
        LaunchError: consent is refused, or nobody is there to give it.
    """
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
    combinations: Sequence[Combination], wanted: Mapping[int, Experiment], outcomes: Outcomes, worker: str
) -> None:
    """Starts them in order; a run on this machine is followed to its end before the next one, if that is wanted.

    A run that is being submitted when Ctrl-C comes is first submitted and noted.
    """
    source: Source | None = None
    jobs: list[tuple[str, ...]] = []
    for number, experiment in wanted.items():
        overrides = combinations[number].overrides
        behind = [job for before in lane(jobs, experiment.max_jobs) for job in before]
        if experiment.dry_run:
            before = lane(range(1, len(jobs) + 1), experiment.max_jobs)
            behind = [f"<jobs of {'runs' if len(before) > 1 else 'run'} {rank_ranges(before)}>"] if before else []
            shown = dry_run(experiment, worker, behind)
            outcomes[number] = replace(outcomes.get(number, Outcome(overrides=overrides)), dry_run=shown)
            jobs.append(())
            continue
        source = source or read_source()
        is_followed = experiment.executor.followed
        try:
            with finishing():
                outcomes[number] = _started(experiment, overrides, worker, source, behind)
        except KeyboardInterrupt:
            if is_followed and number in outcomes and (run := outcomes[number].started) is not None:
                give_up(run)
            raise
        run = outcomes[number].started
        if run is None:
            continue
        print(f"run {run.path}", file=sys.stderr, flush=True)
        if experiment.executor.kind is ExecutorKind.slurm:
            jobs.append(tuple(job["id"] for job in run.read_json(run.jobs)["jobs"]))
        if is_followed:
            follow(run)
            source = None  # it may have changed meanwhile


def _started(
    experiment: Experiment, overrides: tuple[str, ...], worker: str, source: Source, behind: Sequence[str]
) -> Outcome:
    try:
        run = existing(experiment)  # once more: it may be the same as a combination before it
        if run is not None:
            return Outcome(overrides=overrides, run=run, skipped=True)
        for doubt in doubts(experiment) if experiment.executor.rehearse is not Rehearse.none else ():
            print(f"({doubt})", file=sys.stderr, flush=True)
        return Outcome(overrides=overrides, run=start(experiment, overrides, worker, source, behind))
    except TdppError as error:
        return Outcome(overrides=overrides, error=error)
