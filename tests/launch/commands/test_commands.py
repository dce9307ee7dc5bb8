"""`tdpp status`, `logs` and `runs` on runs that really ran."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch import cli
from launch.control import follow as following
from launch.control.follow import follow
from launch.errors import LaunchError
from launch.files.run_files import RunFiles, read_run_files
from launch.judge.status_text import COLUMNS, MORE_COLUMNS
from launch.machine import processes
from launch.machine.job_states import JobState
from launch.observe import look
from launch.observe.look import finish_observation
from launch.observe.observation import Observation
from launch.screen import narrow, plain, print_table
from tests.support.launch.live import TWO_NODES, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands") / "runs"


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunDir:
    run = start(folder, *TWO_NODES)
    follow(run)
    return run


@pytest.fixture(scope="module")
def failed(folder: Path, finished: RunDir) -> RunDir:
    """Later than `finished`."""
    run = start(folder, "+cluster.environment.FAIL_RANK=1")
    follow(run)
    return run


def test_status_tells_the_verdict_first_then_the_evidence(failed: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["status", str(failed.path)]) == 1
    verdict, *evidence = capsys.readouterr().out.splitlines()
    assert verdict.startswith(f"{failed.name}: failed, rank 1 (stage 0, dp 1, tp 0, node local-0) failed with Runtime")
    assert evidence[0].startswith("  plan: tensor 1 x data 2 x pipeline 2, partition 1-3")
    assert "    1 x [rank 1] error: out of luck (local-0)" in evidence


def test_status_as_json_says_the_same(failed: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["status", "--json", str(failed.path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["rule"], told["exit_code"]) == (failed.name, "failed", "rank-failed", 1)
    assert [error["rank"] for error in told["errors"] if not error["symptom"]] == [1]
    assert told["stderr"] == [{"text": "[rank 1] error: out of luck", "count": 1, "nodes": ["local-0"]}]


def test_json_has_no_nan(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(runs, "+cluster.environment.NAN=1")
    follow(run)
    capsys.readouterr()
    assert cli.main(["status", "--json", str(run.path)]) == 7
    told = json.loads(capsys.readouterr().out, parse_constant=lambda constant: pytest.fail(constant))
    assert told["loss"] is None


def test_the_latest_run_is_meant_by_default(
    failed: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(failed.runs.parent)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().out.startswith(f"{failed.name}: failed")


def test_a_run_is_found_by_its_job(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished.read_json(finished.jobs)["jobs"][0]["id"]
    capsys.readouterr()
    assert cli.main(["status", job, "--runs-dir", str(finished.runs)]) == 0
    assert capsys.readouterr().out.startswith(f"{finished.name}: succeeded")


@pytest.mark.parametrize("way", ["folder", "path in it", "name", "name and time", "folder of runs", "job", "latest"])
@pytest.mark.parametrize("verb", ["status", "logs", "stop", "launch", "report", "search"])
def test_every_verb_means_the_same_by_run(
    finished: RunDir, way: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds the run, whatever it then does with it."""
    found: list[RunDir] = []
    find = RunDir.find

    def noted(runs: Path, wanted: str | None) -> RunDir:
        found.append(find(runs, wanted))
        raise RunFolderError("that will do")

    monkeypatch.chdir(finished.runs.parent)
    monkeypatch.setattr(RunDir, "find", noted)
    run = {
        "folder": str(finished.path),
        "path in it": f"runs/{finished.name}/nodes/local-0.json",
        "name": "tiny",
        "name and time": finished.name,
        "folder of runs": "runs/tiny",
        "job": finished.read_json(finished.jobs)["jobs"][0]["id"],
        "latest": "latest",
    }[way]
    given = {"launch": f"resume={run}", "search": f"validate={run}"}.get(verb, run)
    assert cli.main([verb, given]) == 1
    everything = list(RunDir.all(finished.runs))
    if way == "folder of runs" and verb == "report":
        assert found == everything, "the only verb that takes several"
    else:
        assert found == [everything[-1] if way in ("name", "folder of runs", "latest") else finished]


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_without_runs_there_is_a_message(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([command]) == 1
    assert "no runs in" in capsys.readouterr().err


@pytest.mark.parametrize("watch", [[], ["--watch"], ["--json"]], ids=["once", "watch", "json"])
@pytest.mark.parametrize(
    ("folder", "why"), [("nowhere", "No such file or directory"), ("file", "Not a directory")], ids=["none", "file"]
)
def test_a_folder_of_runs_that_is_none_is_no_empty_table(
    tmp_path: Path, folder: str, why: str, watch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["runs", "--runs-dir", str(tmp_path / folder), *watch]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"tdpp: error: --runs-dir {tmp_path / folder}: {why}; give a folder that has runs")


def test_a_folder_without_runs_is_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == list(COLUMNS + MORE_COLUMNS)


def test_runs_lists_every_run_in_a_line(finished: RunDir, failed: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--runs-dir", str(finished.runs)]) == 0
    heading, *rows, reason = capsys.readouterr().out.splitlines()
    assert heading.split() == list(COLUMNS + MORE_COLUMNS)
    assert reason.startswith(f"{failed.name}: failed, rank ")
    told = {row.split()[0]: row.split()[1] for row in rows}
    assert told == {finished.name: "succeeded", failed.name: "failed"}


def test_runs_as_json_are_objects_as_in_status(
    finished: RunDir, failed: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", "--json", "--runs-dir", str(finished.runs)]) == 0
    told = {run["run"]: (run["state"], run["iteration"]) for run in json.loads(capsys.readouterr().out)}
    assert told == {finished.name: ("succeeded", 6), failed.name: ("failed", told[failed.name][1])}


def test_a_run_that_is_deleted_meanwhile_is_not_listed(
    finished: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("deleted", "kept"):
        shutil.copytree(finished.path, tmp_path / "tiny" / name)

    def delayed(look: RunFiles, answers: Mapping[str, JobState]) -> Observation:
        if look.run.path.name == "deleted":
            shutil.rmtree(look.run.path)
        return finish_observation(look, answers)

    monkeypatch.setattr("launch.commands.runs.finish_observation", delayed)
    assert cli.main(["runs", "--runs-dir", str(tmp_path)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["tiny/kept", "succeeded"]]


@pytest.mark.parametrize("jump_s", [-86400.0, -7200.0])
def test_a_clock_that_was_set_back_makes_nothing_negative(
    finished: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    now = time.time
    monkeypatch.setattr(look.time, "time", lambda: now() + jump_s)
    assert cli.main(["status", str(finished.path)]) == 0
    said = capsys.readouterr().out
    assert "succeeded" in said
    assert not re.search(r"-\d+ (s|min|h|days) ago", said)
    assert "logged 0 s ago" in said or re.search(r"logged \d s ago", said)


def test_keys_of_trackers_stand_in_no_file_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = secrets.token_hex(20)
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, key)
    run = start(tmp_path / "runs", "cluster.environment_from=[WANDB_API_KEY]", "+cluster.environment.FAIL_RANK=1")
    follow(run)
    for command in (["status"], ["status", "--json"], ["report"], ["logs"]):
        cli.main([command[0], str(run.path), *command[1:]])
    said = capsys.readouterr()
    assert key not in said.out + said.err
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if key.encode() in path.read_bytes()]


def test_a_run_whose_folder_is_deleted_while_it_runs_is_stopped_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path / "runs", "+cluster.environment.SLOW=1", "train.iterations=100000")
    token = run.read_json(run.jobs)["token"]

    def deleted(found: RunDir) -> None:
        while run.path.exists():  # its processes may just have written something
            shutil.rmtree(run.path, ignore_errors=True)
        read_run_files(found)

    monkeypatch.setattr(following, "_watch", deleted)
    with pytest.raises(LaunchError, match=f"{run.path} was deleted while the run was active; its processes on this"):
        follow(run)
    assert processes.wait_until_gone(token, 60.0) == set()


def test_a_table_without_rows_has_its_heading() -> None:
    assert plain(("a", "bb"), []) == "a  bb"


def test_columns_are_aligned() -> None:
    assert plain(("a", "b"), [("long", "x"), ("s", "yy")]) == "a     b\nlong  x\ns     yy"


def test_a_table_wider_than_the_terminal_loses_nothing() -> None:
    partition = "-".join(["12"] * 32)
    told = narrow(("", "nodes", "partition", "time"), [("1", "a10*8", partition, "1 ms"), ("2", "a10", "")], 40)
    assert told.splitlines() == ["   nodes  time", "1  a10*8  1 ms", f"    partition: {partition}", "2  a10"]


def test_a_table_that_fits_is_as_elsewhere() -> None:
    columns, rows = ("a", "b"), [("long", "x"), ("s",)]
    assert narrow(columns, rows, 7) == plain(columns, rows)
    assert narrow(columns, rows, 6) == "b\nx\n    a: long\n\n    a: s"


@pytest.mark.parametrize("width", [40, 400])
def test_a_terminal_never_cuts_a_cell(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = "-".join(["12"] * 32)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(("rank", "partition"), [("1", partition)])
    told = capsys.readouterr().out
    assert partition in told
    assert ("│" in told) == (width == 400)
