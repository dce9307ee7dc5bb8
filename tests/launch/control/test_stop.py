"""A run that is to end does, at every moment of its life, and says so."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.commands import stop as stop_command
from launch.control import stop
from launch.control.follow import follow
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.observe.look import observe
from megatron_ext.contract.worker import SAVED
from tests.support import PATIENCE_S
from tests.support.launch.launchers import launched_by_another
from tests.support.launch.live import (
    ENVIRONMENT,
    FOREVER,
    TDPP,
    TWO_NODES,
    agents,
    done,
    start,
    tdpp,
    token,
    wait_for,
    wait_until_running,
    workers,
)


@pytest.mark.parametrize(
    "moment",
    [
        lambda run: None,
        lambda run: wait_for(lambda: agents(run)),
        lambda run: wait_for(lambda: workers(run)),
        wait_until_running,
    ],
    ids=["just-submitted", "agent-starting", "worker-starting", "running"],
)
def test_stop_ends_a_run_at_any_moment(runs: Path, moment, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(runs, *FOREVER, *TWO_NODES)
    moment(run)
    assert stop_command.main([str(run.path)]) == 0
    assert processes.find(token(run)) == set()
    assert "stopped" in capsys.readouterr().out
    verdict = judge(run)
    assert (verdict.state, verdict.exit_code) == (State.stopped, 3)


def test_stop_saves_first_where_iterations_would_be_lost_and_says_how_to_go_on(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(runs, *FOREVER, *TWO_NODES)
    wait_until_running(run)
    assert stop_command.main([str(run.path)]) == 0
    seen = observe(run)
    assert seen.saved is not None
    assert seen.saved >= 1
    told = f"ended on request; saved after iteration {seen.saved}; continue with 'tdpp launch resume={run.name}'"
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{run.name}: stopped, {told}; ")
    assert "saving first, for at most 120 s; Ctrl-C ends the run without it" in shown.err
    resumed = shlex.split(shown.err.splitlines()[-1], comments=True)
    assert resumed[:3] == ["next:", "tdpp", "launch"]
    assert Path(resumed[3].removeprefix("resume=")).resolve() == run.path
    assert all(node.exit_code == SAVED for node in seen.nodes)
    assert processes.find(token(run)) == set()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [((), ["--no-save"]), (("train.checkpoint=false",), [])],
    ids=["not-wanted", "saves-nothing"],
)
def test_stop_ends_at_once_what_is_not_to_save(
    runs: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], words: list[str]
) -> None:
    run = start(runs, *FOREVER, *overrides)
    wait_until_running(run)
    if overrides:
        with pytest.raises(LaunchError, match=f"^--save: {run.name} saves no checkpoints"):
            stop_command.main([str(run.path), "--save"])
        assert not observe(run).over
    assert stop_command.main([str(run.path), *words]) == 0
    assert capsys.readouterr().out.startswith(f"{run.name}: stopped, ended on request; nothing was saved; ")


def test_what_does_not_save_in_time_is_ended_without(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)
    monkeypatch.setattr(stop, "SAVE_S", 1.0)
    for pid in workers(run):
        os.kill(pid, signal.SIGSTOP)
    assert stop_command.main([str(run.path), "--save"]) == 0
    assert processes.find(token(run)) == set()
    assert judge(run).state is State.stopped


def test_an_interrupted_saving_says_that_nothing_is_saved(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)

    def interrupted(_run: RunDir) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(stop_command, "save_first", interrupted)
    assert stop_command.main([str(run.path), "--save"]) == 0
    assert "interrupted: ending the run without saving\n" in capsys.readouterr().err
    assert processes.find(token(run)) == set()


def test_what_ends_before_it_has_saved_says_where_to_look(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)

    def killed(run: RunDir) -> bool:
        for pid in workers(run):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: observe(run).over)
        return True

    monkeypatch.setattr(stop_command, "save_first", killed)
    assert stop_command.main([str(run.path), "--save"]) == 0
    said = f"node local-0 ended before it had saved: it exited with -9; see {run.node_err('local-0')}\n"
    assert said in capsys.readouterr().err


def test_a_checkpoint_that_could_not_be_written_is_told(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full: ranks end as if they had saved, for a failed save ends no run with an error."""
    run = start(runs, *FOREVER)
    wait_until_running(run)

    def without_a_checkpoint(run: RunDir) -> bool:
        ended = stop.save_first(run)
        run.latest_checkpoint.unlink()
        return ended

    monkeypatch.setattr(stop_command, "save_first", without_a_checkpoint)
    assert stop_command.main([str(run.path), "--save"]) == 0
    said = f"the checkpoint could not be written: {observe(run).log[-1].iteration} iterations lost; see "
    assert said in capsys.readouterr().err


@pytest.mark.fast
def test_stop_finds_the_processes_of_a_submission_that_was_cut_off(runs: Path) -> None:
    run = start(runs, *FOREVER)
    run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": []})
    assert stop.stop(run) != "no process was left"
    assert processes.find(token(run)) == set()


def test_a_submission_to_slurm_that_is_under_way_is_not_over(runs: Path) -> None:
    """None of its jobs is in the queue yet."""
    run = start(runs)
    follow(run)
    run.node_state("local-0").unlink()
    run.write_json(run.jobs, {**run.read_json(run.jobs), "executor": "slurm", "jobs": []})
    with launched_by_another(run):
        assert not stop.is_over(run)


def test_stop_leaves_a_run_alone_that_has_ended(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(runs)
    follow(run)
    assert stop_command.main([run.name, "--runs-dir", str(runs)]) == 0
    shown = capsys.readouterr()
    assert "has already ended: succeeded" in shown.out
    assert shown.err.splitlines()[-1].startswith("next: tdpp report ")
    assert not run.stop_request.exists()


def test_a_run_is_stopped_whatever_its_files_hold(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)
    with run.metrics.open("a") as file:
        file.write("0\n")
    os.mkfifo(run.rank_error(0))
    run.node_ranks("local-0").unlink(missing_ok=True)
    os.mkfifo(run.node_ranks("local-0"))
    run.provenance.write_text("[]")
    assert stop_command.main([str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"{run.name}: stopped, ended on request; ")
    assert processes.find(token(run)) == set()


def test_the_latest_run_is_not_stopped_unasked(runs: Path) -> None:
    run = start(runs, *FOREVER)
    refused = done("stop", cwd=runs.parent)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert (
        refused.stderr
        == f"tdpp: error: without RUN this would stop the latest run, {run.name}; name it, or add --yes\n"
    )
    assert not observe(run).over and not run.stop_request.exists()
    assert done("stop", "--yes", cwd=runs.parent).returncode == 0
    assert processes.find(token(run)) == set()


@pytest.mark.parametrize(("answer", "code", "state"), [("y", 0, State.stopped), ("", 1, State.running)], ids=["y", "n"])
def test_on_a_terminal_it_is_asked_whether_the_latest_run_is_meant(
    runs: Path, answer: str, code: int, state: State
) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)
    terminal, ours = pty.openpty()
    command = subprocess.Popen([*TDPP, "stop"], cwd=runs.parent, env=ENVIRONMENT, stdin=ours, stdout=ours, stderr=ours)
    os.close(ours)
    assert os.read(terminal, 1000).decode() == f"the latest run is {run.name} (running); stop it? [y/N] "
    os.write(terminal, f"{answer}\n".encode())
    assert command.wait(timeout=PATIENCE_S) == code
    os.close(terminal)
    assert judge(run).state is state
    stop.stop(run)


def test_a_failure_before_the_stop_stays_a_failure(runs: Path) -> None:
    run = start(runs, *FOREVER, "+cluster.environment.FAIL_RANK=0")
    wait_for(lambda: run.rank_error(0).exists())
    stop.stop(run)
    assert judge(run).state == State.failed


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_an_interrupted_launcher_stops_its_run(runs: Path, signum: signal.Signals) -> None:
    launcher = tdpp("launch", *FOREVER, "train.log_interval=1", cwd=runs.parent)
    wait_for(lambda: list(runs.glob("tiny/*/metrics.jsonl")))
    os.killpg(launcher.pid, signum)
    out, err = launcher.communicate(timeout=PATIENCE_S)
    run = RunDir.find(runs, None)
    assert launcher.returncode == 130
    assert processes.find(token(run)) == set()
    assert f"stopped {run.name}" in err
    assert "Traceback" not in err
    assert out == f"{run.name}: stopped, ended on request; nothing was saved\n"


def test_an_interrupt_during_submission_leaves_nothing(runs: Path) -> None:
    launcher = tdpp("launch", *FOREVER, cwd=runs.parent)
    wait_for(lambda: list(runs.glob("tiny/*")))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130
    left = list(RunDir.all(runs))
    assert [judge(run).state for run in left] in ([], [State.stopped])
    assert not any(processes.find(token(run)) for run in left)


def test_a_run_that_is_not_followed_outlives_the_launcher_and_its_terminal(runs: Path) -> None:
    terminal, ours = pty.openpty()
    launcher = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *TDPP, "launch", "executor.wait=false", "train.iterations=60"],
        cwd=runs.parent,
        env=ENVIRONMENT,
        stdin=ours,
        stdout=ours,
        stderr=ours,
    )
    os.close(ours)
    assert launcher.wait(timeout=PATIENCE_S) == 0
    os.close(terminal)
    run = RunDir.find(runs, None)
    assert not observe(run).over
    wait_for(lambda: observe(run).over)
    assert judge(run).state == State.succeeded


def test_a_run_that_is_not_followed_keeps_no_pipe_of_the_launcher(runs: Path) -> None:
    begun = time.monotonic()
    launcher = done("launch", "executor.wait=false", *FOREVER, cwd=runs.parent)
    assert launcher.returncode == 0
    assert time.monotonic() - begun < PATIENCE_S
    run = RunDir.find(runs, None)
    assert launcher.stdout.startswith(f"{run.name}: starting")
    assert not observe(run).over
    stop.stop(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [("plan.json", "{"), ("jobs.json", "{"), ("jobs.json", "{}"), ("plan.json", None), ("jobs.json", None)],
    ids=["plan cut off", "jobs cut off", "jobs empty", "plan gone", "jobs gone"],
)
def test_a_run_whose_own_files_are_damaged_is_ended(
    runs: Path, name: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(runs, *FOREVER, *TWO_NODES)
    wait_until_running(run)
    mark, file = token(run), run.path / name
    whole = file.read_text()
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert stop_command.main([str(run.path)]) == 0
    assert processes.find(mark) == set()
    told = capsys.readouterr().out
    assert "processes ended" in told
    assert name in told
    with pytest.raises(RunFolderError, match=name):  # nothing is left to be stopped
        stop_command.main([str(run.path)])
    file.write_text(whole)  # for those that look whether something is left
    assert judge(run).state == State.stopped
