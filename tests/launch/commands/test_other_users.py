"""Two users on one machine: what each may do with the other's runs, and what they are told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands import stop as stop_command
from launch.commands.launch import main as launch
from launch.control import stop
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.observe.look import observe
from tests.support import PATIENCE_S
from tests.support.launch.live import ENVIRONMENT, FOREVER, TDPP, no_data_needed, start, token, wait_until_running
from tests.support.ordinary_user import ANOTHER, NOBODY, only_root_is_two_users

pytestmark = only_root_is_two_users


def other_user(*arguments: str, cwd: Path, group: int = NOBODY) -> subprocess.CompletedProcess[str]:
    """`tdpp` as another user types it, to its end."""
    return subprocess.run(
        [*ANOTHER, f"--regid={group}", *TDPP, *arguments],
        cwd=cwd,
        env=ENVIRONMENT | {"USER": "nobody", "LOGNAME": "nobody"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture
def theirs(runs: Path) -> RunDir:
    """A run of another user, at work."""
    runs.mkdir()
    os.chown(runs, NOBODY, NOBODY)
    done = other_user("launch", "executor.wait=false", *FOREVER, f"runs_dir={runs}", cwd=runs)
    assert done.returncode == 0, done.stderr
    run = RunDir.find(runs, None)
    wait_until_running(run)
    return run


@pytest.fixture
def ours(runs: Path) -> RunDir:
    """A run of this user, at work."""
    run = start(runs, *FOREVER)
    wait_until_running(run)
    return run


def test_root_stops_the_run_of_another_user(theirs: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert not observe(theirs).over
    assert stop_command.main([str(theirs.path)]) == 0
    assert processes.find(token(theirs)) == set()
    assert judge(theirs).state is State.stopped
    out = capsys.readouterr().out
    assert "stopped, ended on request" in out
    assert "saved after iteration" in out or "processes ended" in out


def test_root_is_told_how_the_owner_of_a_run_that_has_saved_resumes_it(
    theirs: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop_command.main([str(theirs.path), "--save"]) == 0
    saved = observe(theirs).saved
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"next: runuser -u nobody -- tdpp launch resume={theirs.path}  # continues after iteration {saved}"
    )


def test_a_run_that_root_has_stopped_is_its_owners_to_resume(theirs: RunDir) -> None:
    stop.stop(theirs)
    done = other_user("launch", f"resume={theirs.path}", cwd=theirs.runs)
    assert done.returncode == 0, done.stderr
    # A loaded machine looks so late that the ranks already train.
    assert done.stdout.split(",")[0] in {f"{theirs.name}: starting", f"{theirs.name}: running"}
    assert not theirs.stop_request.exists()
    stop.stop(theirs)


def test_root_does_not_resume_the_run_of_another_user(theirs: RunDir) -> None:
    stop.stop(theirs)
    before = {path: path.stat().st_mtime_ns for path in theirs.path.rglob("*")}
    with pytest.raises(LaunchError, match=r"belongs to nobody, but its jobs would run as user root; use 'runuser"):
        launch([f"resume={theirs.path}"], preflight=no_data_needed)
    assert {path: path.stat().st_mtime_ns for path in theirs.path.rglob("*")} == before


@pytest.mark.parametrize("group", [NOBODY, os.getgid()], ids=["stranger", "member of a group that may write"])
def test_another_user_neither_stops_nor_resumes_a_run(ours: RunDir, group: int) -> None:
    for path in (ours.path, *ours.path.rglob("*")):
        path.chmod(path.stat().st_mode | 0o020)
    stopped = other_user("stop", str(ours.path), cwd=ours.path, group=group)
    assert (stopped.returncode, stopped.stdout) == (1, "")
    assert "belongs to root, and user nobody cannot end its processes; only root" in stopped.stderr
    resumed = other_user("launch", f"resume={ours.path}", cwd=ours.path, group=group)
    assert resumed.returncode == 1
    assert f"resume={ours.name}: the run belongs to root, but its jobs would run as user nobody" in resumed.stderr
    assert not ours.stop_request.exists()
    assert not observe(ours).over
    stop.stop(ours)


def test_another_user_sees_a_run_as_its_owner_does(ours: RunDir) -> None:
    told = other_user("status", str(ours.path), cwd=ours.path)
    assert (told.returncode, told.stdout.split(",")[0]) == (0, f"{ours.name}: running")
    stop.stop(ours)
    told = other_user("stop", str(ours.path), cwd=ours.path)
    assert (told.returncode, told.stderr) == (0, "next: tdpp status .  # the evidence, and what to do\n")
    assert "has already ended: stopped" in told.stdout
    told = other_user("status", ".", cwd=ours.path)
    assert (told.returncode, told.stdout.split(",")[0]) == (judge(ours).exit_code, f"{ours.name}: stopped"), told.stderr
