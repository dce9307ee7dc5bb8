"""Runs on a Slurm that does not answer, or shows nobody else's jobs: their own files tell what they can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch import cli
from launch.control.submit import resume
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support.launch.run_folders import NOW, OK, Case, Error, Node, ended

SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
HIDES = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
LOST = Node(beat=NOW - 300)


def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, sacct: str = "exit 1") -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("squeue", squeue), ("sacct", sacct)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def made(case: Case, tmp_path: Path) -> RunDir:
    run = case.make(tmp_path / "runs" / "tiny" / "1-1")
    jobs = [{"id": "41", "role": "job", "nodes": [0, 1]}]
    run.write_json(run.jobs, {"token": "t", "executor": "slurm", "submission": 0, "jobs": jobs})
    run.submitit.mkdir()
    return run


@pytest.mark.parametrize(
    ("case", "state", "reason"),
    [
        pytest.param(Case(last=20), State.running, "4 ranks at work", id="nodes-that-beat"),
        pytest.param(Case([ended(1), Node()], [Error(0, NOW - 6)]), State.failed, "rank 0 ", id="a-rank-that-failed"),
        pytest.param(Case([OK, OK], last=50), State.succeeded, "iteration 50 of 50", id="finished"),
        pytest.param(Case(last=20, age=99), State.stalled, "no iteration logged for 99 s", id="stalled"),
        pytest.param(
            Case([Node(), LOST], last=20),
            State.unknown,
            "node local-1 last showed a sign of life 5 min ago, and Slurm does not answer: squeue",
            id="a-node-that-is-silent-too",
        ),
        pytest.param(
            Case([Node(), None]), State.unknown, "node local-1 has not reported yet", id="a-node-that-never-came"
        ),
        pytest.param(
            Case([ended(143, "SIGTERM")] * 2, last=20), State.unknown, "may be started again", id="ended-from-outside"
        ),
    ],
)
def test_while_slurm_does_not_answer_a_run_is_judged_by_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, state: State, reason: str
) -> None:
    slurm_says(tmp_path, monkeypatch, SILENT)
    run = made(case, tmp_path)
    verdict = judge(run, NOW)
    assert (verdict.state, reason in verdict.reason) == (state, True), verdict
    told = [line for line in verdict.evidence if "Unable to contact slurm controller" in line]
    assert bool(told) == (state is not State.succeeded)
    assert verdict.exit_code == 1 or state is not State.unknown


def test_status_tells_what_it_knows_and_that_this_is_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_says(tmp_path, monkeypatch, SILENT)
    run = made(Case([Node(), LOST], last=20), tmp_path)
    assert cli.main(["status", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("tiny/1-1: unknown, ")
    assert "iteration: 20 of 50" in out
    assert "job 41 is UNKNOWN (Slurm does not answer): local-0, local-1" in out
    OmegaConf.save(OmegaConf.structured(compose()), run.config)
    with pytest.raises(LaunchError, match="it may still be running: node local-0 last showed a sign"):
        resume(run)


@pytest.mark.parametrize(
    ("beat", "state"), [(NOW - 1, State.running), (NOW - 300, State.lost)], ids=["beats", "silent"]
)
def test_a_job_that_slurm_shows_nobody_else_is_judged_by_its_nodes_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beat: float, state: State
) -> None:
    slurm_says(tmp_path, monkeypatch, HIDES, sacct="exit 0")
    assert judge(made(Case([Node(beat=beat)] * 2, last=20), tmp_path), NOW).state is state
