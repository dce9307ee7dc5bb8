"""A launch may be killed at any moment: what is left can be judged, listed, stopped and launched again at once."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from launch import cli
from launch.control import stop
from launch.control.submit import resume, submit
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import decide, judge, verdict_on
from launch.machine import processes
from launch.node.settings import NodeSettings
from launch.observe.look import observe
from launch.start_agent import run_node
from launch.sweep.start import existing
from tests.support.cases import fewer
from tests.support.launch import fake_slurm
from tests.support.launch.live import FOREVER, WORKER, token
from tests.support.slurm.seed import NODES, SMALL

STEPS = {"os.mkdir", "os.rename", "os.symlink", "subprocess.Popen", "os.fork", "fcntl.fcntl"}
"""Python's audit events, before each of which a launch is killed once: all that others can see of it."""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_slurm.put_on_path(tmp_path, monkeypatch)


def local(runs: Path) -> Experiment:
    return compose([f"runs_dir={runs}", *FOREVER])


def on_slurm(runs: Path) -> Experiment:
    """A master job and a slave job."""
    return compose([f"runs_dir={runs}", *NODES, *SMALL, *FOREVER])


WRITE = "open"
"""The event of a file that is opened. As a step, one that is made: the launch is killed when it is there, empty."""


def killed_at(step: int, experiment: Experiment, steps: Collection[str]) -> bool:
    """Launches in a process that is killed before the step of that number, from when it has a folder; whether it came
    so far."""
    launcher = os.fork()
    if launcher:
        status = os.waitpid(launcher, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0
        return os.WIFSIGNALED(status)
    own, left = os.getpid(), iter(range(step))

    made: list[object] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in steps or os.getpid() != own or made:
            return
        if event == WRITE and not (
            int(str(arguments[2])) & os.O_CREAT and str(experiment.runs_dir) in str(arguments[0])
        ):
            return
        if begun() and next(left, None) is None:
            if event == WRITE:
                made.append(arguments[0])
                Path(str(arguments[0])).touch(0o600)
            os.kill(own, signal.SIGKILL)

    def begun() -> bool:
        return any(Path(experiment.runs_dir).glob("*/*/nodes"))

    code = 1
    try:
        sys.addaudithook(hook)
        submit(experiment, [], WORKER)
        code = 0
    finally:
        os._exit(code)


def left_of_each_kill(experiment: Experiment, steps: Collection[str] = STEPS, *, each: int = 1) -> Iterator[RunDir]:
    """A run folder for every step of a launch, or every `each`-th, cut off there; it is deleted before the next."""
    runs = Path(experiment.runs_dir)
    for step in itertools.count(step=each):
        killed = killed_at(step, experiment, steps)
        run = RunDir.find(runs, None)
        if not killed:
            stop.stop(run)
            return
        yield run
        shutil.rmtree(run.path)


def assert_is_settled_by_stop(
    run: RunDir, experiment: Experiment, capsys: pytest.CaptureFixture[str], *, waiting: bool
) -> None:
    """`waiting`: whether jobs of it are in the queue."""
    assert cli.main(["runs", "--runs-dir", str(run.runs)]) == 0, "a launch that was cut off is not damage"
    assert existing(replace(experiment, skip_existing=True)) is None or waiting
    begun = time.monotonic()
    capsys.readouterr()
    assert cli.main(["stop", str(run.path)]) == 0
    assert time.monotonic() - begun < 60, "nothing has to be waited for that may never come"
    assert cli.main(["stop", str(run.path)]) == 0, "as often as one likes"
    assert capsys.readouterr().err.count("next: ") == (2 if RunDir.is_one(run.path) else 0)
    verdict = verdict_on(run)
    assert verdict.state in (State.lost, State.stopped), verdict
    assert cli.main(["status", str(run.path)]) == verdict.exit_code
    assert cli.main(["runs", "--runs-dir", str(run.runs)]) == 0
    assert existing(replace(experiment, skip_existing=True)) is None
    assert cli.main(["report", str(run.path)]) == (0 if RunDir.is_one(run.path) else 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_local_launch_that_is_killed_at_any_step_is_settled_by_stop(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = local(runs)
    count = 0
    for run in left_of_each_kill(experiment):
        assert_is_settled_by_stop(run, experiment, capsys, waiting=run.jobs.exists() and processes.find(token(run)))
        assert not run.jobs.exists() or not processes.find(token(run))
        count += 1
    assert count > 10


def test_a_launch_on_slurm_that_is_killed_at_any_step_is_settled_by_stop(
    runs: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = on_slurm(runs)
    waiting = set()
    for run in left_of_each_kill(experiment, each=fewer(2, 1)):
        waiting.add(jobs := len(list(queue.glob("*.job"))))
        assert_is_settled_by_stop(run, experiment, capsys, waiting=jobs > 0)
        assert not list(queue.glob("*.job"))
    assert waiting == {0, 1, 2}


def test_a_launch_on_slurm_that_is_killed_at_any_step_is_resumed_or_says_why_not(runs: Path, queue: Path) -> None:
    resumed = 0
    for run in left_of_each_kill(on_slurm(runs), {"subprocess.Popen", "os.symlink"}):
        waiting = {path.stem for path in queue.glob("*.job")}
        named = {job["id"] for job in run.read_json(run.jobs)["jobs"]} if run.jobs.exists() else set()
        try:
            resume(run)
        except LaunchError as error:
            if RunDir.is_one(run.path):
                assert waiting, error
                assert "it has not ended yet" in str(error)
            else:
                assert "there is nothing to resume: launch it again" in str(error)
        else:
            resumed += 1
            assert len(waiting | named) <= 2
            assert len(list(queue.glob("*.job"))) == 2, "those of the launch that was cut off are gone"
            assert judge(run).state is State.starting
        stop.stop(run)
    assert resumed


@pytest.mark.slow
def test_a_launch_that_is_killed_between_making_a_file_and_writing_it_is_resumed_or_was_never_started(
    runs: Path, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.judge.verdict.PLANNING_S", 0.0)  # of a lock that nobody has signed yet
    seen = {"resumed": 0, "again": 0, "waits": 0}
    for run in left_of_each_kill(on_slurm(runs), {WRITE}):
        assert cli.main(["runs", "--runs-dir", str(runs)]) == 0, "no damage"
        verdict = verdict_on(run)
        try:
            resume(run)
        except LaunchError as error:
            if RunDir.is_one(run.path):
                assert "it has not ended yet" in str(error)
                seen["waits"] += 1
            else:
                assert verdict.rule == "launch-cut-off"
                assert "nothing was started; there is nothing to resume: launch it again" in str(error)
                seen["again"] += 1
        else:
            assert verdict.rule == "launch-cut-off"
            assert re.fullmatch("[0-9a-f]{64}\n", run.secret.read_text())
            assert run.secret.stat().st_mode & 0o777 == 0o600
            for role in ("master", "slave"):
                assert NodeSettings.read(run, run.agent(1, role).name, group=False).submission == 1
            seen["resumed"] += 1
        stop.stop(run)
    assert all(seen.values()), seen


def test_a_secret_that_was_cut_off_counts_as_none(runs: Path, queue: Path) -> None:
    """As an older version, killed just then, may have left it."""
    run = submit(on_slurm(runs), [], WORKER)
    whole = run.secret.read_text()
    stop.stop(run)
    for cut in ("", whole[:20]):
        run.secret.write_text(cut)
        resume(run)
        assert re.fullmatch("[0-9a-f]{64}\n", found := run.secret.read_text())
        stop.stop(run)
        resume(run)
        assert run.secret.read_text() == found, "one that is whole is kept"
        stop.stop(run)


def test_a_job_whose_submission_outlives_its_launch_is_ended_by_stop(
    runs: Path, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sbatch is still on its way when nobody waits for it any more."""
    sbatch = queue.parent / "bin" / "sbatch"
    sbatch.rename(sbatch.with_name("real-sbatch"))
    sbatch.write_text('#!/bin/sh\n[ "$1" = --test-only ] || { kill -9 $PPID; sleep 1; }\nexec real-sbatch "$@"\n')
    sbatch.chmod(0o755)
    assert killed_at(0, on_slurm(runs), {})
    run = RunDir.find(runs, None)
    assert not list(queue.glob("*.job"))
    stop.stop(run)
    assert not list(queue.glob("*.job"))
    assert judge(run).state is State.stopped
    time.sleep(1)
    assert not list(queue.glob("*.job"))


def test_a_job_that_nobody_wrote_down_is_found_by_its_comment(runs: Path, queue: Path) -> None:
    """As when the launch is killed before it has noted the job's id."""
    run = submit(on_slurm(runs), [], WORKER)
    master, slave = run.read_json(run.jobs)["jobs"]
    run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": [master, {**slave, "id": None}]})
    seen = observe(run)
    assert [(job.id, job.nodes) for job in seen.jobs] == [("100", ("hgx-0",)), ("101", ("gpu2-0", "gpu2-1"))]
    assert decide(seen).state is State.starting
    with pytest.raises(LaunchError, match="it has not ended yet: starting"):
        resume(run)
    (queue / "101.job").unlink()
    assert judge(run).rule == "launch-cut-off"
    assert stop.stop(run) == "1 job ended (100)"
    assert judge(run).state is State.stopped


def test_an_agent_of_a_launch_that_was_resumed_meanwhile_does_not_run(
    runs: Path, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue may give it its nodes late."""
    run = submit(on_slurm(runs), [], WORKER)
    settings = NodeSettings.read(run, run.agent(0, "master").name, group=False)
    stop.stop(run)
    resume(run)
    monkeypatch.setenv("_TEST_CLUSTER_", "slurm")
    with pytest.raises(LaunchError, match="submitted again, but this job belongs to an earlier submission"):
        run_node(settings)
    assert not list(run.nodes.iterdir())
    stop.stop(run)
