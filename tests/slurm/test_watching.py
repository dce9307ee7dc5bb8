"""Looking at runs on a real Slurm cluster: what could not start is told, many runs are one question, watching ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch import cli
from tests.support import PATIENCE_S
from tests.support.cases import drawn
from tests.support.launch.live import FOREVER, ROOT, TDPP
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import BOTH_WAYS, at_work, submitted, verdict_of, wait_for


@pytest.mark.parametrize("het", drawn(BOTH_WAYS, 0, always=["hetjob"]))
def test_of_agents_that_cannot_start_the_reason_is_told(
    slurm: Cluster, tmp_path: Path, het: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The nodes have no such python, as when the run's environment is not on a shared file system."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    run = submitted(tmp_path / "runs", f"executor.het={het}")
    verdict_of(run)
    capfd.readouterr()
    assert cli.main(["status", str(run.path)]) == 1
    told = capfd.readouterr().out
    assert "output of agents that are gone, or of their job:" in told
    assert "/nonexistent/python: No such file or directory" in told
    assert "hgx-0" in told.partition("output of")[2]


def looking(*arguments: str) -> subprocess.Popen[str]:
    """`tdpp` on the login node."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*TDPP, *arguments], env=environment, text=True, stdout=subprocess.PIPE)


def counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the login node's squeue and sacct note that they are called; where they do."""
    calls, binaries = folder / "calls", folder / "bin"
    binaries.mkdir()
    for command in ("squeue", "sacct"):
        script = binaries / command
        script.write_text(f'#!/bin/sh\necho {command} >>{calls}\nexec {shutil.which(command)} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    return calls


def test_many_runs_are_one_question_to_slurm(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = ["parallel.node_order=gpu2", "parallel.pipeline=1", "parallel.partition=4"]
    assert verdict_of(submitted(tmp_path / "runs", *alone, "train.iterations=2")).exit_code == 0
    for _ in range(2):
        submitted(tmp_path / "runs", *alone, *FOREVER)
    made = list(RunDir.all(tmp_path / "runs"))
    wait_for(lambda: all(at_work(run) for run in made[1:]))
    calls = counted(tmp_path, monkeypatch)
    capfd.readouterr()
    assert cli.main(["runs", "--runs-dir", str(tmp_path / "runs")]) == 0
    rows = capfd.readouterr().out.splitlines()[1:]
    assert [row.split()[1] for row in rows] == ["succeeded"] + ["running"] * 2
    assert calls.read_text().split() == ["squeue"], "all terms are in the queue, or over"
    for run in made[1:]:
        assert cli.main(["stop", str(run.path)]) == 0


def test_following_a_log_and_watching_end_with_the_run(slurm: Cluster, tmp_path: Path) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, "train.log_interval=1")
    wait_for(lambda: at_work(run))
    log, status = (looking(*command, str(run.path)) for command in (["logs", "-f"], ["status", "--watch=1"]))
    assert status.stdout is not None
    assert f"{run.name}: running" in status.stdout.readline()
    assert cli.main(["stop", str(run.path)]) == 0
    shown, _ = log.communicate(timeout=PATIENCE_S)
    assert log.returncode == 0
    assert f"gpu2-1: {run.node_out('gpu2-1').read_text().splitlines()[-1]}" in shown
    told, _ = status.communicate(timeout=PATIENCE_S)
    assert status.returncode == 3
    assert f"{run.name}: stopped, ended on request" in told
