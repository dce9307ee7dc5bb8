"""Who launches a run is known as long as that process lives, and nobody else launches it meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from conf.compose import compose, config_text
from conf.run_folder.rundir import RunDir
from launch import cli
from launch.control import submit
from launch.control.submit import resume
from launch.errors import LaunchError
from launch.files.locks import is_launching, launching
from launch.judge.state import State
from launch.judge.verdict import PLANNING_S, judge, verdict_on
from launch.observe.executors import SUBMISSION_S
from tests.support.launch.launchers import launched_by_another
from tests.support.launch.live import wait_for
from tests.support.launch.run_folders import NOW, Case, ended
from tests.support.ordinary_user import ordinary_user


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has failed."""
    made = Case([ended(1), ended(1)]).make(tmp_path / "runs" / "tiny" / "1-1")
    made.config.write_text(config_text(compose()))
    return made


def test_a_launch_is_under_way_until_its_process_is_gone(run: RunDir) -> None:
    with launched_by_another(run) as pid:
        assert is_launching(run) is True
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert is_launching(run) is False


def test_what_the_launcher_has_forked_goes_on_with_the_launch(run: RunDir) -> None:
    launcher = os.fork()
    if launcher == 0:
        with launching(run):
            if os.fork() == 0:
                time.sleep(2)
            os._exit(0)
    os.waitpid(launcher, 0)
    assert is_launching(run) is True
    wait_for(lambda: is_launching(run) is False)


def test_ones_own_launch_is_none_of_another(run: RunDir) -> None:
    with launching(run):
        assert is_launching(run) is False


def test_nobody_can_tell_without_a_lock_or_from_another_machine(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_launching(run) is None
    with launching(run):
        pass
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert is_launching(run) is None
    with launched_by_another(run):
        assert is_launching(run) is True


def test_a_user_who_may_only_read_sees_the_launch_too(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path)
    with launched_by_another(run), ordinary_user():
        assert is_launching(RunDir(Path())) is True


@pytest.mark.parametrize("error", [OSError(37, "No locks available")], ids=["ENOLCK"])
def test_a_file_system_without_locks_keeps_nobody_from_launching(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with launching(run):
        assert is_launching(run) is None


def test_the_second_who_resumes_a_run_is_told_who_was_first(run: RunDir) -> None:
    before = run.jobs.read_text()
    with launched_by_another(run) as pid, pytest.raises(LaunchError) as caught:
        resume(run)
    assert str(caught.value).startswith(f"tiny/1-1 is being launched by process {pid} of ")
    assert run.jobs.read_text() == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}"], ids=repr)
def test_a_damaged_lock_tells_nothing(run: RunDir, content: bytes) -> None:
    run.launch_lock.write_bytes(content)
    assert is_launching(run) is None


@pytest.mark.parametrize(
    ("age", "stop", "state"),
    [
        (SUBMISSION_S - 9, None, State.starting),
        (SUBMISSION_S + 9, None, State.lost),
        (SUBMISSION_S - 9, NOW - 1, State.stopped),
    ],
    ids=["young", "old", "asked to stop"],
)
def test_where_nobody_can_tell_time_does(tmp_path: Path, age: float, stop: float | None, state: State) -> None:
    run = Case([None, None], submitted=NOW - age, stop=stop).make(tmp_path / "run")
    run.write_json(run.jobs, {**run.read_json(run.jobs), "executor": "slurm"})
    os.utime(run.jobs, (NOW - age, NOW - age))
    assert judge(run, NOW).state is state


@pytest.mark.parametrize(
    ("age", "stopped", "state", "reason"),
    [
        (0, False, State.starting, "its launch is still under way"),
        (0, True, State.stopped, "ended on request"),
        (PLANNING_S, False, State.lost, "was interrupted before it had a plan; nothing was started"),
    ],
    ids=["young", "young, but asked to stop", "old"],
)
def test_a_run_without_a_plan_has_a_verdict(
    tmp_path: Path,
    age: float,
    stopped: bool,
    state: State,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDir(tmp_path / "tiny" / "1-1")
    run.nodes.mkdir(parents=True)
    if stopped:
        run.write_json(run.stop_request, {"unix": NOW})
    changed = run.path.stat().st_mtime - age
    os.utime(run.path, (changed, changed))
    verdict = verdict_on(run)
    assert (verdict.state, reason in verdict.reason) == (state, True)
    assert cli.main(["status", str(run.path)]) == verdict.exit_code
    assert capsys.readouterr().out == f"tiny/1-1: {verdict.state}, {verdict.reason}\n"
    assert cli.main(["status", "--json", str(run.path)]) == verdict.exit_code
    assert json.loads(capsys.readouterr().out)["state"] == state
    assert cli.main(["runs", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["tiny/1-1", str(state)]


def test_a_run_that_has_saved_does_not_wait_once_more_for_the_run_before_it(run: RunDir) -> None:
    """That one may be deleted by now."""
    words = ["executor=slurm", "executor.after=gone", f"runs_dir={run.path.parents[1]}"]
    experiment = compose(words)
    with pytest.raises(LaunchError, match=r"executor\.after=gone: no run 'gone' in "):
        submit._jobs_before(experiment, run)
    run.latest_checkpoint.parent.mkdir(exist_ok=True)
    run.latest_checkpoint.write_text("iter_0000010\n")
    assert submit._jobs_before(experiment, run) == ()
