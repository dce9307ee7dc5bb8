"""python -m launch.tracking.writer RUN TRACKER: carries metrics.jsonl to a tracker until stdin is closed.

A process of its own, beside the node agent of the last rank: what it does, or fails to do, harms no rank. It says once,
on stderr, why it ended early; what the tracker's library prints goes to trackers/<tracker>.log in the run's folder.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from conf.run_folder.run_files import appended
from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker
from conf.visible import without_passwords
from launch.errors import LaunchError
from launch.files.locks import FileLock
from launch.tracking.run_info import Subject
from launch.tracking.series import MetricsFile, Point, Points

POLL_S = 1.0
LOCKED_S = 10.0
"""The writer of the start before may still be ending."""


class Series(Protocol):
    """The series of a run in a tracker. Made with a `Subject`, it goes on with what the tracker has of the run."""

    place: str
    """Where to look."""

    def write(self, points: Iterable[Point]) -> None:
        """Writes the points that the tracker does not have yet."""

    def close(self, *, finished: bool) -> None:
        """`finished`: whether the run has reached its last iteration or its goal."""


def write(kind: Tracker, run: RunDir, lines: Iterable[Mapping[str, Any]]) -> str:
    """Writes all lines of a run; returns where to look. Raises LaunchError: the run's own writer is at work."""
    subject = Subject.of(run)
    with _alone(run, kind, wait_s=0.0):
        series = _opened(kind, subject)
        made = Points(subject.scale)
        points = [made.of(line) for line in lines]
        series.write(points)
        series.close(finished=_is_finished(run, subject, points))
    return series.place


def follow(kind: Tracker, run: RunDir, over: int) -> None:
    """Writes what the run logs, until the other end of the pipe `over` is closed, and what is there then."""
    with _alone(run, kind, wait_s=LOCKED_S):
        source, subject = MetricsFile(run.metrics), Subject.of(run)
        series, made = _opened(kind, subject), Points(subject.scale)
        points: list[Point] = []
        ended = False
        while not ended:
            ended = bool(select.select([over], [], [], POLL_S)[0])
            lines, cut = source.new_lines()
            if cut:  # the iterations behind are trained anew
                series.close(finished=False)
                series, made = _opened(kind, subject), Points(subject.scale)
            points = [made.of(line) for line in lines] or points
            series.write(points if lines else ())
        series.close(finished=_is_finished(run, subject, points))


def _opened(kind: Tracker, subject: Subject) -> Series:
    """Imports the tracker's library, which takes a while."""
    made: Series
    if kind is Tracker.tensorboard:
        made = import_module("launch.tracking.trackers").TensorBoard(subject)
    elif kind is Tracker.wandb:
        made = import_module("launch.tracking.trackers").WandB(subject)
    else:
        made = import_module("launch.tracking.trackers").MLflow(subject)
    return made


def _is_finished(run: RunDir, subject: Subject, points: Sequence[Point]) -> bool:
    return run.goal.exists() or any(point.iteration >= subject.iterations for point in points)


@contextmanager
def _alone(run: RunDir, kind: Tracker, wait_s: float) -> Iterator[None]:
    run.trackers.mkdir(exist_ok=True)
    with FileLock(run.trackers / f"{kind}.lock") as lock:
        until = time.monotonic() + wait_s
        while not lock.try_take(fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise LaunchError(f"{kind}: the run's own writer is active and writes everything that the run logs")
            time.sleep(0.1)
        yield


def main(argv: Sequence[str]) -> int:
    run, kind = RunDir(Path(argv[0])), Tracker(argv[1])
    stderr = os.dup(sys.stderr.fileno())
    try:
        run.trackers.mkdir(exist_ok=True)
        with appended(run.tracker_log(kind)) as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        follow(kind, run, sys.stdin.fileno())
    except Exception as error:  # noqa: BLE001  (a library's, of any kind: it ends this process alone)
        reason = without_passwords((str(error).splitlines() or [""])[0])
        os.write(stderr, f"log={kind} ended: {type(error).__name__}: {reason}{_WAY_OUT.format(kind)}\n".encode())
        return 1
    return 0


_WAY_OUT = "; the run continues, and 'tdpp report RUN --{}' writes what is missing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
