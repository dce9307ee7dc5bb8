"""`tdpp runs` lists every run there is, also one that cannot be judged, and says why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.rundir import RunDir
from launch import cli
from launch.observe import SUBMISSION_S
from launch.runs import listed
from tests.launch.test_verdict import OK, Case


def made(runs: Path, name: str, age: float = 2 * SUBMISSION_S) -> RunDir:
    """A run that has succeeded; its folder is this old."""
    run = Case([OK, OK], last=50).make(runs / "tiny" / name)
    return aged(run, age)


def aged(run: RunDir, age: float) -> RunDir:
    modified = run.path.stat().st_mtime - age
    os.utime(run.path, (modified, modified))
    return run


def table(runs: Path, capsys: pytest.CaptureFixture[str], code: int) -> list[str]:
    assert cli.main(["runs", "--runs-dir", str(runs)]) == code
    return capsys.readouterr().out.splitlines()


def drop_key(run: RunDir) -> None:
    state = run.read_json(run.node_state("local-1"))
    del state["start"], state["pid"]
    run.write_json(run.node_state("local-1"), state)


DAMAGE: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "no plan": (lambda run: run.plan.unlink(), "is damaged: plan.json not there, although it was started"),
    "no configuration": (lambda run: run.config.unlink(), "is damaged: config.yaml not there"),
    "no jobs": (lambda run: run.jobs.unlink(), "is not a run: jobs.json is not there"),
    "plan cut short": (lambda run: run.plan.write_text('{"version": 1, "nod'), "plan.json is not JSON: "),
    "plan of something else": (lambda run: run.plan.write_text("{}"), "it lacks version, run, tensor"),
    "a list for an object": (lambda run: run.jobs.write_text("[]"), "jobs.json is damaged: it holds no JSON object"),
    "a node without keys": (drop_key, "local-1.json is damaged, or of another version of tdpp: it lacks start, pid"),
    "no text": (lambda run: run.jobs.write_bytes(b"\xff"), "jobs.json is not JSON: "),
    "metrics": (lambda run: run.metrics.write_text("{}\n"), "metrics.jsonl holds a line that is no logged iteration"),
    "a folder": (lambda run: (run.metrics.unlink(), run.metrics.mkdir()), "Is a directory: "),
}


@pytest.mark.parametrize(("damage", "why"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_run_is_a_line_with_its_reason_among_the_others(
    tmp_path: Path, damage: Callable[[RunDir], object], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = made(tmp_path, "20260102-000000-b")
    made(tmp_path, "20260101-000000-a")
    made(tmp_path, "20260103-000000-c")
    damage(broken)
    aged(broken, 2 * SUBMISSION_S)
    heading, *rows = table(tmp_path, capsys, code=1)
    assert heading.split() == ["run", "verdict", "iteration", "loss", "ms/iteration", "note"]
    assert [row.split()[:2] for row in rows] == [
        ["tiny/20260101-000000-a", "succeeded"],
        ["tiny/20260102-000000-b", "unknown"],
        ["tiny/20260103-000000-c", "succeeded"],
    ]
    assert why in rows[1]


def test_the_exit_code_and_a_message_say_that_a_run_could_not_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "a").jobs.unlink()
    assert cli.main(["runs", "--json", "--runs-dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    (told,) = json.loads(captured.out)
    assert (told["run"], told["state"]) == ("tiny/a", None)
    assert "jobs.json is not there" in told["reason"]
    assert captured.err.count("\n") == 1
    assert "some runs could not be judged" in captured.err


def test_a_run_that_is_just_being_made_is_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "a", age=0).plan.unlink()
    assert table(tmp_path, capsys, code=0) == ["run  verdict  iteration  loss  ms/iteration"]


def test_folders_that_are_no_runs_are_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweeps" / "20260101-000000").mkdir(parents=True)
    (tmp_path / "a file").touch()
    assert len(table(tmp_path, capsys, code=0)) == 1


def on_slurm(run: RunDir, job: str) -> RunDir:
    jobs = [{"id": job, "role": "job", "nodes": [0, 1]}]
    run.write_json(run.jobs, {"token": job, "executor": "slurm", "submission": 0, "jobs": jobs})
    return run


def test_where_slurm_does_not_answer_only_runs_that_need_it_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_slurm(made(tmp_path, "1-over"), "11")
    on_slurm(Case(last=20).make(tmp_path / "tiny" / "2-at-work"), "12")
    made(tmp_path, "3-local")
    monkeypatch.setenv("PATH", "/nonexistent")
    rows = table(tmp_path, capsys, code=1)[1:]
    assert [row.split()[:2] for row in rows] == [
        ["tiny/1-over", "succeeded"],
        ["tiny/2-at-work", "unknown"],
        ["tiny/3-local", "succeeded"],
    ]
    assert "squeue is not on this machine" in rows[1]


def test_the_jobs_of_all_runs_are_asked_about_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        on_slurm(Case(last=20).make(tmp_path / "tiny" / f"{number:02d}-at-work"), str(100 + number))
        on_slurm(made(tmp_path, f"{number:02d}-over"), str(200 + number))
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    for command in ("squeue", "sacct"):
        script = tmp_path / "bin" / command
        script.write_text(f'#!/bin/sh\necho "{command} $@" >>{calls}\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert len(listed(tmp_path)) == 60
    squeue, sacct = calls.read_text().splitlines()
    for asked in (squeue, sacct):
        assert all(str(100 + number) in asked for number in range(30))
        assert not any(str(200 + number) in asked for number in range(30))
