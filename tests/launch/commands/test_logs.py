"""`tdpp logs`: what is asked for, from where it is asked, to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuTrouble, entry_text
from conf.run_folder.log_lines import WIDTH, for_people
from conf.run_folder.rundir import RunDir
from launch import cli
from launch.commands.logs import tail_begin
from launch.control.follow import PART_BYTES, Log, follow
from launch.files.records import JobRecord, Submitted
from launch.files.run_files import agent_logs
from megatron_ext.contract.plan import Plan
from tests.conf.run_folder.test_log_lines import OLD
from tests.support.launch.live import FOREVER, TWO_NODES, start, wait_for, wait_until_running


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = start(tmp_path_factory.mktemp("logs") / "runs", *TWO_NODES)
    follow(run)
    return run


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert cli.main(["logs", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_logs_are_those_of_the_nodes(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["logs", str(finished.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "local-0: NODE_RANK: 0"
    assert sum(line.startswith("local-1:  iteration ") for line in lines) == 6
    assert cli.main(["logs", str(finished.path), "--node", "local-1"]) == 0
    assert capsys.readouterr().out == finished.node_out("local-1").read_text()


def test_lines_of_iterations_fit_the_terminal_and_are_megatrons_when_asked_for(
    finished: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    file = finished.node_out("local-1")
    before = file.read_text()
    file.write_text(f"{before}{OLD}\n")
    (read,) = told(capsys, str(finished.path), "--tail=1", "--node=local-1")
    assert (read, len(read) <= WIDTH) == (for_people(OLD), True)
    assert told(capsys, str(finished.path), "--tail=1", "--node=local-1", "--format=megatron") == [OLD]
    *_, beside = told(capsys, str(finished.path), "--tail=1")
    assert beside == f"local-1: {read}"
    file.write_text(before)


def test_logs_of_an_unknown_node_name_the_known_ones(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", str(finished.path), "--node", "x"]) == 1
    assert f"--node x: no such node; the run {finished.name} has the nodes local-0, local-1" in capsys.readouterr().err


def test_logs_are_followed_to_the_end(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = start(runs, "train.iterations=20")
    assert cli.main(["logs", "-f", str(run.path)]) == 0
    assert capfd.readouterr().out == run.node_out("local-0").read_text()
    assert "      20/      20" in run.node_out("local-0").read_text()
    follow(run)


def test_the_tail_is_that_of_each_node(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, str(finished.path), "--tail", "2")
    assert [line.partition(": ")[0] for line in lines] == ["local-0"] * 2 + ["local-1"] * 2
    assert [line.partition(": ")[2] for line in lines[2:]] == finished.node_out("local-1").read_text().splitlines()[-2:]


@pytest.mark.parametrize("word", ["-1", "many", "1.5"])
def test_a_tail_that_is_no_number_of_lines_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["logs", f"--tail={word}"])
    assert "is not a number of lines" in capsys.readouterr().err


CONTENTS = {
    "empty": b"",
    "one line": b"a\n",
    "no newline at the end": b"a\nbb\nccc",
    "empty lines": b"\n\na\n\n",
    "many lines": b"".join(b"%d\n" % number for number in range(3 << 15)),
    "long lines": b"x" * (1 << 17) + b"\n" + b"y" * (1 << 17) + b"\nz\n",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("lines", [0, 1, 2, 3, 1000, 10**6])
def test_a_tail_has_the_last_lines(tmp_path: Path, content: bytes, lines: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    last = content.splitlines(keepends=True)[-lines:] if lines else []
    assert content[tail_begin(path, lines) :] == b"".join(last)


def test_gpu_readings_and_stderr_are_shown_when_asked_for(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    reading = entry_text(GpuTrouble(unix=1_000_000, text="no GPU here"))
    finished.node_gpu("local-1").write_text(reading)
    finished.node_err("local-0").write_text("oops, and no newline")
    assert told(capsys, str(finished.path), "--gpu") == [f"local-1: {reading.strip()}"]
    assert told(capsys, str(finished.path), "--err", "--node", "local-0") == ["oops, and no newline"]


def test_that_nothing_was_printed_is_said(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, str(finished.path), "--err", "--node", "local-1") == []
    assert cli.main(["logs", str(finished.path), "--err", "--node", "local-1"]) == 0
    assert "node local-1 wrote nothing to stderr: no errors, no warnings" in capsys.readouterr().err


def test_what_agents_printed_is_shown_when_asked_for(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, str(finished.path), "--agent")
    assert any(line.startswith("local-1: agent of node local-1 of ") and "task 1 of job" in line for line in lines)
    alone = told(capsys, str(finished.path), "--agent", "--node", "local-1")
    assert [f"local-1: {line}" for line in alone] == [line for line in lines if line.startswith("local-1: ")]


def submitted(*jobs: JobRecord) -> Submitted:
    return Submitted(token="t", executor="slurm", submission=0, jobs=jobs)


def test_agents_of_a_heterogeneous_job_are_found_by_their_tasks(tmp_path: Path) -> None:
    """Its second component has an id of its own; tasks are counted through, in the order of the job's nodes."""
    run = RunDir(tmp_path)
    run.submitit.mkdir()
    for name in ("40_0_log.out", "41_1_log.out", "41_2_log.out", "40_batch.out", "39_0_log.out", "40_0_result.txt"):
        (run.submitit / name).touch()
    names = [("hgx-0", "hgx"), ("gpu2-0", "gpu2"), ("gpu2-1", "gpu2")]
    plan = Plan.of({"nodes": [{"name": name, "group": group} for name, group in names]}, tmp_path)
    found = agent_logs(run, plan, submitted(JobRecord(id="40", nodes=(0, 2, 1))))
    assert {source: [path.name for path in paths] for source, paths in found.items()} == {
        "hgx-0": ["40_0_log.out"],
        "gpu2-1": ["41_1_log.out"],
        "gpu2-0": ["41_2_log.out"],
        "job 40": ["40_batch.out"],
    }


def test_agents_of_coupled_jobs_with_ids_in_a_row_are_told_apart(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.submitit.mkdir()
    for name in ("40_0_log.out", "41_0_log.out", "40_batch.out", "41_batch.out"):
        (run.submitit / name).touch()
    plan = Plan.of({"nodes": [{"name": f"{group}-0", "group": group} for group in ("hgx", "gpu2")]}, tmp_path)
    found = agent_logs(run, plan, submitted(JobRecord(id="40", nodes=(0,)), JobRecord(id="41", nodes=(1,))))
    assert {source: [path.name for path in paths] for source, paths in found.items()} == {
        "hgx-0": ["40_0_log.out"],
        "gpu2-0": ["41_0_log.out"],
        "job 40": ["40_batch.out"],
        "job 41": ["41_batch.out"],
    }


def test_a_log_that_is_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    assert log.new_lines() == []
    path.write_text("a long first line\nhalf")
    assert (log.new_lines(), log.new_lines(), log.rest()) == (["a long first line"], [], "half")
    path.write_text("anew\n")
    assert log.new_lines() == ["anew"]


def test_a_long_log_is_read_in_parts_and_an_endless_line_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (PART_BYTES + 5) + b"\nlast\n")
    log, lines = Log(path), []
    while more := log.new_lines():
        lines += more
    assert "".join(lines) == "x" * (PART_BYTES + 5) + "last"


def test_following_a_tail_begins_there(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = start(runs, *FOREVER)
    wait_until_running(run)
    wait_for(lambda: run.node_out("local-0").read_text().count(" iteration ") > 5)
    (run.path / "stop.json").write_text('{"unix": 0}')
    assert cli.main(["logs", "-f", "--tail", "1", str(run.path)]) == 0
    shown = capfd.readouterr().out
    assert run.node_out("local-0").read_text().endswith(shown)
    assert "NODE_RANK" not in shown
