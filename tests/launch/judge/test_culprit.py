"""Who brought a run down, and the ends of its logs."""

from __future__ import annotations

from pathlib import Path

from launch.judge.findings import LINES, findings
from launch.judge.status_text import as_json, as_text
from launch.observe.look import observe
from tests.support.launch.run_folders import NOW, Case, Error, ended

LOST = "[rank 0 (stage 0, dp 0, tp 0)] error: lost rank 3"
TRACE = ["[rank 3 (stage 1, dp 1, tp 0)] Traceback (most recent call last):", *(f"  line {n}" for n in range(40))]


def test_its_last_lines_are_shown_without_those_of_its_victims(tmp_path: Path) -> None:
    errors = [Error(0, NOW - 7, message="lost rank 3", symptom=True), Error(3, NOW - 9, message="bad luck")]
    run = Case([ended(1), ended(1, at=NOW - 8)], errors).make(tmp_path / "run")
    run.node_err("local-1").write_text("\n".join(["before", *TRACE, "RuntimeError: bad luck", LOST, ""]))
    run.node_out("local-1").write_text(" iteration 10\n")
    found = findings(run, observe(run, NOW))
    assert found.culprit is not None
    assert (found.culprit.node, found.culprit.ranks) == ("local-1", (3,))
    (said,) = found.culprit.said
    assert said.path == run.node_err("local-1")
    assert list(said.lines) == [*TRACE, "RuntimeError: bad luck"][-LINES:]
    assert f"log of node local-1: {said.path}" in as_text(found)
    assert as_json(found)["culprit"]["logs"] == {str(said.path): list(said.lines)}


def test_a_short_stderr_is_followed_by_the_end_of_stdout(tmp_path: Path) -> None:
    run = Case([ended(1), ended(1)], [Error(3, NOW - 9, message="bad luck")]).make(tmp_path / "run")
    run.node_err("local-1").write_text("[rank 3 (stage 1, dp 1, tp 0)] error: bad luck\n")
    run.node_out("local-1").write_text("".join(f" iteration {number}\n" for number in range(100)))
    found = findings(run, observe(run, NOW))
    assert found.culprit is not None
    assert [(one.path.name, len(one.lines), one.lines[-1]) for one in found.culprit.said] == [
        ("local-1.err", 1, "[rank 3 (stage 1, dp 1, tp 0)] error: bad luck"),
        ("local-1.out", LINES - 1, " iteration 99"),
    ]


def test_a_worker_that_ended_by_itself_is_its_nodes(tmp_path: Path) -> None:
    run = Case([ended(143, "SIGTERM"), ended(-9, at=NOW - 8)]).make(tmp_path / "run")
    run.node_err("local-1").write_text("one line\n")
    found = findings(run, observe(run, NOW))
    assert found.culprit is not None
    assert (found.culprit.node, found.culprit.ranks) == ("local-1", ())
    assert found.culprit.what == "the worker of node local-1 was killed by SIGKILL"


def test_a_run_that_is_over_has_nothing_yet_to_come(tmp_path: Path) -> None:
    run = Case([ended(1), ended(1)]).make(tmp_path / "run")
    assert "yet" not in as_text(findings(run, observe(run, NOW)))


def test_a_run_that_is_well_has_none(tmp_path: Path) -> None:
    run = Case([ended(0), ended(0)], last=50).make(tmp_path / "run")
    assert findings(run, observe(run, NOW)).culprit is None
