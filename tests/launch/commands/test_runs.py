"""`tdpp runs` lists every run there is, also one that cannot be judged, and says why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch import cli
from launch.commands.runs import listed
from launch.control.planning.plan import make_plan
from launch.machine.job_states import JobState
from launch.observe.executors import SUBMISSION_S
from tests.support.launch.live import TWO_NODES
from tests.support.launch.run_folders import NOW, OK, Case, Node, ended
from tests.support.ordinary_user import open_to_others, ordinary_user

HEADING = ["run", "verdict", "iteration", "loss", "ms/iteration", "kind", "age", "took", "left", "plan", "hosts"]


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
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.split(" ")[0].endswith(":")]  # without the reasons below


def drop_key(run: RunDir) -> None:
    state = run.read_json(run.node_state("local-1"))
    del state["start"], state["pid"]
    run.write_json(run.node_state("local-1"), state)


DAMAGE: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "no plan": (lambda run: run.plan.unlink(), "is damaged: plan.json missing, although the run was started"),
    "no configuration": (lambda run: run.config.unlink(), "is damaged: config.yaml missing, although the run was"),
    "no jobs": (lambda run: run.jobs.unlink(), "is not a run: it has no jobs.json"),
    "plan cut short": (lambda run: run.plan.write_text('{"version": 1, "nod'), "plan.json is not JSON: "),
    "plan of something else": (lambda run: run.plan.write_text("{}"), "it lacks version, run, tensor"),
    "a list for an object": (lambda run: run.jobs.write_text("[]"), "jobs.json is damaged: it is not a JSON object"),
    "a node without keys": (drop_key, "local-1.json is damaged, or of another version of tdpp: it lacks start, pid"),
    "no text": (lambda run: run.jobs.write_bytes(b"\xff"), "jobs.json is not text: byte 0 is not UTF-8"),
    "another type": (
        lambda run: run.jobs.write_text(run.jobs.read_text().replace("[]", '[{"id": 1, "nodes": [0]}]')),
        "jobs.json is damaged: jobs[0].id=1 must be a string",
    ),
    "too deep": (lambda run: run.jobs.write_text("[" * 10**5), "too deeply"),
    "a folder": (lambda run: (run.metrics.unlink(), run.metrics.mkdir()), "metrics.jsonl is a folder, not a regular"),
    "a pipe": (
        lambda run: (run.node_state("local-0").unlink(), os.mkfifo(run.node_state("local-0"))),
        "local-0.json is a named pipe, not a regular file",
    ),
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
    assert heading.split() == [*HEADING, "note"]
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
    assert "it has no jobs.json" in told["reason"]
    assert captured.err.count("\n") == 1
    assert "some runs could not be judged" in captured.err


def test_a_run_that_is_just_being_made_is_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "a", age=0).plan.unlink()
    (heading,) = table(tmp_path, capsys, code=0)
    assert heading.split() == HEADING


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


DAY = 86400


def launched(runs: Path, name: str, ago: float, case: Case) -> RunDir:
    """A run whose folder was made so many seconds before now."""
    stamp = datetime.fromtimestamp(NOW - ago).strftime("%Y%m%d-%H%M%S")
    return case.make(runs / name / f"{stamp}-{len(name):08x}")


def rehearsed(run: RunDir) -> RunDir:
    """All of it ran on one node."""
    settings = [*TWO_NODES, "train.iterations=50", "executor.rehearse=virtual"]
    run.write_json(run.plan, make_plan(compose(settings), run.name).as_json())
    run.node_state("local-0").rename(run.node_state("rehearsal-0"))
    return run


@pytest.fixture
def several(tmp_path: Path) -> dict[str, RunDir]:
    """Runs of every kind, the oldest first."""
    done = [Node("ended", 0, ended=NOW - 5, started=NOW - 605)] * 2
    going = [Node(started=NOW - 7300), Node(started=NOW - 7200)]
    return {
        "old": launched(tmp_path, "tiny", 3 * DAY, Case([ended(1), ended(1)])),
        "rehearsed": rehearsed(launched(tmp_path, "xl", 5 * 3600, Case(done, last=50, loss=None))),
        "queued": on_slurm(launched(tmp_path, "seed_a10", 4 * 3600, Case(going, last=20)), "12"),
        "new": launched(tmp_path, "tiny", 700, Case(done, last=50)),
    }


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    monkeypatch.setattr("launch.machine.slurm_commands.job_states", lambda ids, *_: dict.fromkeys(ids, RUNNING))


RUNNING = JobState(id="12", state="RUNNING")


@pytest.mark.usefixtures("now")
def test_a_line_tells_kind_age_duration_and_plan(
    tmp_path: Path, several: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    _, *rows = table(tmp_path, capsys, code=0)
    told = {name: row.split("  ") for name, row in zip(several, rows, strict=True)}
    cells = {name: [cell.strip() for cell in parts if cell.strip()][5:] for name, parts in told.items()}
    plan = "tp1 dp2 pp2, 1-3, batch 2/16, "
    assert cells == {
        "old": ["local", "3 days", cells["old"][2], "-", plan + "local*2", "-"],
        "rehearsed": ["rehearsal", "5 h", "10 min", "-", plan + "local*2", "-"],
        "queued": ["slurm", "4 h", "2 h", cells["queued"][3], plan + "local*2", "-"],
        "new": ["local", "12 min", "10 min", "-", plan + "local*2", "-"],
    }


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], ["old", "rehearsed", "queued", "new"]),
        (["tiny"], ["old", "new"]),
        (["tiny", "xl"], ["old", "rehearsed", "new"]),
        (["s*_a?0"], ["queued"]),
        (["xl/*"], ["rehearsed"]),
        (["{runs}/tiny"], ["old", "new"]),
        (["{runs}"], ["old", "rehearsed", "queued", "new"]),
        (["{new}/nodes"], ["new"]),
        (["latest"], ["new"]),
        (["12"], ["queued"]),
        (["--kind", "rehearsal"], ["rehearsed"]),
        (["--kind=local,slurm"], ["old", "queued", "new"]),
        (["--verdict", "failed"], ["old"]),
        (["--verdict", "failed,stalled"], ["old"]),
        (["--verdict", "not finite"], []),
        (["--verdict", "not_finite,running"], ["queued"]),
        (["--limit", "2"], ["queued", "new"]),
        (["--limit", "9"], ["old", "rehearsed", "queued", "new"]),
        (["tiny", "--limit", "1"], ["new"]),
        (["--limit", "1", "--verdict", "failed"], ["old"]),
        (["--limit", "1", "--kind", "rehearsal"], ["rehearsed"]),
        (["--limit=1", "--kind=local", "--verdict=succeeded", "tiny"], ["new"]),
    ],
    ids=" ".join,
)
def test_runs_can_be_chosen(
    tmp_path: Path, several: dict[str, RunDir], given: list[str], found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(runs=tmp_path, new=several["new"].path) for word in given]
    assert cli.main(["runs", "--runs-dir", str(tmp_path), "--json", *words]) == 0
    told = [run["run"] for run in json.loads(capsys.readouterr().out)]
    assert told == [several[name].name for name in found]


@pytest.mark.usefixtures("now")
def test_only_the_runs_within_the_limit_are_looked_into(
    tmp_path: Path, several: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    several["old"].jobs.unlink()
    assert len(table(tmp_path, capsys, code=1)) == 5
    assert cli.main(["runs", "--runs-dir", str(tmp_path), "--limit", "3"]) == 0


def test_as_json_every_figure_has_its_unit(tmp_path: Path, several: dict[str, RunDir], now: None, capsys) -> None:
    assert cli.main(["runs", "--runs-dir", str(tmp_path), "--json", "xl"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["launched_unix"], told["took_s"]) == ("rehearsal", NOW - 5 * 3600, 600)
    assert told["plan"] == "tp1 dp2 pp2, 1-3, batch 2/16, local*2"


@pytest.mark.parametrize(
    ("given", "told", "code"),
    [
        (["nope"], "no run 'nope' in ", 1),
        (["tin?y"], "no run 'tin?y' in ", 1),
        (["--verdict", "fialed"], "must be one or more of starting, running, succeeded, failing, failed", 2),
        (["--kind", "pbs"], "must be one or more of local, slurm, hosts, rehearsal", 2),
        (["--limit", "0"], "must be a whole number, at least 1", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_means_no_run_is_told(
    tmp_path: Path, given: list[str], told: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "a")
    try:
        done = cli.main(["runs", "--runs-dir", str(tmp_path), *given])
    except SystemExit as ended:
        done = ended.code
    assert done == code
    assert told in capsys.readouterr().err


def test_a_watch_prints_nothing_anew_because_time_goes_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(tmp_path, "tiny", 60, Case(last=20))
    later = iter(range(0, 10_000, 200))
    over = iter([False] * 3 + [True] * 99)
    monkeypatch.setattr("time.time", lambda: NOW + next(later) / 100)
    monkeypatch.setattr("launch.commands.runs.Listed.over", property(lambda _: next(over)))
    assert cli.main(["runs", "--watch=0.01", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("tiny/") == 1


def test_folders_of_others_that_are_closed_are_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with open_to_others() as runs:
        first = made(runs, "20260101-000000-a")
        for closed in (made(runs, "20260102-000000-b"), made(runs / "x", "c")):
            closed.path.chmod(0)
        with ordinary_user():
            assert cli.main(["runs", "--runs-dir", str(runs)]) == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["run", first.name]
    assert captured.err == f"1 folder in {runs} cannot be read and is not listed\n"


CLOSED = ("plan.json", "jobs.json", "nodes", "nodes/local-1.json", "metrics.jsonl")
"""Without any of these nobody can say how a run is."""


@pytest.mark.parametrize("part", CLOSED)
def test_of_a_run_a_part_of_which_is_closed_one_line_tells(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_to_others() as runs:
        first, second = made(runs, "20260101-000000-a"), made(runs, "20260102-000000-b")
        (second.path / part).chmod(0)
        with ordinary_user():
            assert cli.main(["runs", "--runs-dir", str(runs)]) == 0
            listed = capsys.readouterr()
            assert cli.main(["runs", second.name, "--runs-dir", str(runs)]) == 1
            asked = capsys.readouterr()
            assert cli.main(["status", second.name, "--runs-dir", str(runs)]) == 1
            judged = capsys.readouterr()
            assert cli.main(["logs", second.name, "--runs-dir", str(runs)]) == (part not in CLOSED[3:])
    assert [line.split()[0] for line in listed.out.splitlines()] == ["run", first.name]
    assert listed.err == f"1 folder in {runs} cannot be read and is not listed\n"
    why = f"{part}{'/local-0.json' * (part == 'nodes')}: cannot be read (Permission denied)"
    assert (asked.out, asked.err.count("\n")) == ("", 1)
    assert f"{second.path}/{why}" in asked.err
    assert (judged.out + judged.err).count(f"{second.path}/{why}") == 1


@pytest.mark.parametrize("part", ["config.yaml", "provenance.json", "events", "errors", "checkpoints", "submitit"])
def test_a_run_is_judged_without_what_does_not_tell_how_it_is(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_to_others() as runs:
        run = made(runs, "20260101-000000-a")
        run.node_out("local-1").write_text("well\n")
        (run.path / part).mkdir(exist_ok=True) if "." not in part else (run.path / part).touch()
        (run.path / part).chmod(0)
        with ordinary_user():
            assert cli.main(["runs", "--runs-dir", str(runs)]) == 0
            assert cli.main(["status", run.name, "--runs-dir", str(runs)]) == 0
            assert cli.main(["logs", run.name, "--runs-dir", str(runs)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("succeeded") == 2
    assert captured.out.endswith("\nlocal-1: well\n")
    assert captured.err == ""


def test_a_damaged_line_is_noted_beside_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, "20260101-000000-a")
    with run.metrics.open("a") as file:
        file.write("0\n")
    heading, row = table(tmp_path, capsys, code=0)
    assert heading.split() == [*HEADING, "note"]
    assert row.split()[1] == "succeeded"
    assert row.endswith("metrics.jsonl has lines that are not iterations: line 11 is damaged: it is not a JSON object")


def test_a_node_whose_file_is_damaged_leaves_the_rest_of_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, "20260101-000000-a")
    run.node_state("local-1").write_text('{"start": 1}')
    assert cli.main(["status", str(run.path)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{run.name}: unknown, {run.node_state('local-1')} is damaged, or of another version")
    assert any(line.startswith("  iteration: 50 of 50, ") for line in told)
    assert "  node local-0: exited with 0" in told


def test_what_cannot_be_printed_is_named_and_the_other_nodes_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, "20260101-000000-a")
    run.node_out("local-1").write_text("well\n")
    os.mkfifo(run.node_out("local-0"))
    for options in ((), ("--tail", "3")):
        assert cli.main(["logs", str(run.path), *options]) == 1
        captured = capsys.readouterr()
        assert captured.out == "local-1: well\n"
        assert captured.err == f"tdpp: error: {run.node_out('local-0')} is a named pipe, not a regular file\n"
    with run.node_err("local-0").open("wb") as file:
        file.truncate(2**40)
    assert cli.main(["logs", str(run.path), "--err", "--node", "local-0"]) == 1
    assert capsys.readouterr().err.endswith(f"has {2**40} bytes; print its end with --tail N\n")
