"""The values by which a sweeper chooses what to try next: a metric of each run, once it is over."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

from conf.run_folder.iteration_time import LineTime, iteration_time
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch.control.follow import wait
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.sweep.combinations import Outcome
from launch.tracking.metrics_file import MetricsFile
from launch.tracking.series import Point, Points
from launch.tracking.subject import Subject

_TIME, _RATES = "iteration_ms", "throughput/"


class NoValue(LaunchError):
    """A combination that has no value of the sweep's metric."""


def value_of(outcome: Outcome, metric: str) -> float:
    """Waits until the run is over.

    Raises:
        NoValue: there is no run, it has not succeeded, or it did not log the metric.
    """
    run = outcome.run
    if run is None:
        raise NoValue(f"a combination has no {metric}, because its run was not started")
    wait(run)
    verdict = judge(run)
    if verdict.state is not State.succeeded:
        raise NoValue(f"{run.name} has no {metric}: {verdict.state}, {verdict.reason}")
    points = _points(run)
    value = in_points(points, metric)
    if value is None:
        logged = ", ".join(sorted({name for point in points for name in point.values}))
        raise NoValue(f"{run.name} has no {metric}: it logged {logged}")
    print(visible(f"{run.name}: {metric} {value:.6g}"), file=sys.stderr, flush=True)
    return value


def in_points(points: Sequence[Point], metric: str) -> float | None:
    """The last value; of speeds the median, without the first, which warms up, unless it is alone; of `iteration_ms`
    what `tdpp runs` shows, which is per sample where the batch changes."""
    found = [point.values[metric] for point in points if metric in point.values]
    if not found:
        return None
    if metric == _TIME:
        time = iteration_time(_times(points))
        return None if time is None else time.ms
    return statistics.median(found[1:] or found) if metric.startswith(_RATES) else found[-1]


def _times(points: Sequence[Point]) -> Iterator[LineTime]:
    for point in points:
        if _TIME in point.values:
            samples = point.values.get("samples")
            yield LineTime(point.iteration, point.values[_TIME], None if samples is None else int(samples))


def _points(run: RunDir) -> list[Point]:
    made = Points(Subject.of(run).scale)
    lines, _ = MetricsFile(run.metrics).new_lines()
    return [made.of(line) for line in lines]
