"""What is decided about a sweep before anything of it is submitted; one launch is a sweep of one. Nothing here acts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ExecutorKind, Experiment
from conf.visible import plural
from launch.control.planning.dry_run import DryRun
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.observe.observation import Observation

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
    """Of the sweep's metric, once the run is over."""

    @property
    def started(self) -> RunDir | None:
        """The run, if it is new."""
        return None if self.skipped else self.run


def counts_as_done(seen: Observation) -> bool:
    """Whether a run need not be started again: it has succeeded, or is still in the queue or running.

    Raises:
        LaunchError: nobody knows.
    """
    verdict = decide(seen)
    if verdict.state is State.unknown:
        raise LaunchError(f"skip_existing=true: it is unknown whether {seen.plan.run} still runs: {verdict.reason}")
    return verdict.state is State.succeeded or not seen.over


def lane(started: Sequence[T], max_jobs: int | None) -> Sequence[T]:
    """Those of the runs started so far, all of which must have ended before the next one may start.

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
