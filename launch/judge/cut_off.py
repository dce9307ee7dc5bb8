"""Runs whose launch did not come as far as a plan: it is under way, or was cut off, and nothing of it ever ran."""

from __future__ import annotations

import time

from conf.errors import RunFolderError
from conf.run_folder.run_files import entries
from conf.run_folder.rundir import RunDir
from launch.files.launch_lock import is_launching, launcher
from launch.files.records import Submitted
from launch.judge.state import State
from launch.judge.verdict import Verdict, judge

PLANNING_S = 10.0
"""A launch has written its plan by then, where nothing shows whether it goes on."""


def verdict_without_plan(run: RunDir) -> Verdict | None:
    """The verdict on a run that has no plan; None for one that has.

    Raises:
        RunFolderError: it had a plan, or is gone.
    """
    launching = is_launching(run)
    if RunDir.is_one(run.path):
        return None
    _check_it_never_ran(run)
    stopped = run.stop_request.exists()
    if launching is None:
        launching = is_young(run, PLANNING_S) and not stopped
    if launching:
        return Verdict(State.starting, "launching", "its launch is still under way", ())
    if stopped:
        return Verdict(State.stopped, "stopped", "ended on request before anything was started", ())
    reason = f"its launch ({launcher(run)}) was interrupted before it had a plan; nothing was started"
    return Verdict(State.lost, "launch-cut-off", reason, ())


def verdict_on(run: RunDir) -> Verdict:
    """The verdict on a run, whether it has a plan or not."""
    return verdict_without_plan(run) or judge(run)


def is_young(run: RunDir, seconds: float) -> bool:
    """Whether a run's folder has changed within so many seconds: somebody may just be making it, or deleting it."""
    try:
        return time.time() - run.path.stat().st_mtime < seconds
    except FileNotFoundError:
        return False


def _check_it_never_ran(run: RunDir) -> None:
    """The plan is the last thing that is written before anything is started."""
    if not run.path.is_dir():
        raise RunFolderError(f"{run.path} no longer exists")
    lacking = " and ".join(path.name for path in (run.config, run.plan) if not path.is_file())
    started = run.plan.is_file() or run.metrics.exists() or any(entries(run.nodes))
    submitted = run.read(run.jobs, Submitted)
    if started or (submitted is not None and submitted.jobs):
        raise RunFolderError(f"{run.path} is damaged: {lacking} missing, although the run was started")
