"""What `tdpp status` tells beside the verdict: stderr with its cause first, and what lost agents left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.judge.findings import STDERR_BYTES, all_findings, findings
from launch.judge.status_text import as_json, as_text
from launch.observe.look import observe
from tests.support.launch.live import ENVIRONMENT
from tests.support.launch.run_folders import NOW, Case, Error, Node, ended


def test_the_lines_of_the_node_that_failed_first_come_first_and_symptoms_last(tmp_path: Path) -> None:
    errors = [Error(0, NOW - 7, message="lost rank 3", symptom=True), Error(3, NOW - 9, message="bad luck\nof all")]
    run = Case([ended(1), ended(1, at=NOW - 8)], errors).make(tmp_path / "run")
    run.node_err("local-0").write_text("[rank 0] error: lost rank 3\none said this\n")
    run.node_err("local-1").write_text("two said this\n[rank 3] RuntimeError: bad luck\n")
    told = [group.text for group in findings(run, observe(run, NOW)).stderr]
    assert told == [
        "[rank 3] RuntimeError: bad luck",
        "two said this",
        "one said this",
        "[rank 0] error: lost rank 3",
    ]


def test_a_page_also_gets_the_warnings(tmp_path: Path) -> None:
    run = Case([ended(1), ended(1)]).make(tmp_path / "run")
    run.node_err("local-0").write_text("UserWarning: 1\nbad luck\nUserWarning: 2\n")
    found = all_findings(run)
    assert [(one.text, one.count) for one in found.warnings] == [("UserWarning: 1", 2)]
    assert [one.text for one in found.stderr] == ["bad luck"]


def test_without_errors_of_ranks_the_worker_that_ended_first_by_itself_comes_first(tmp_path: Path) -> None:
    run = Case([ended(143, "SIGTERM", at=NOW - 9), ended(1, at=NOW - 8)]).make(tmp_path / "run")
    for node in ("local-0", "local-1"):
        run.node_err(node).write_text(f"{node} ended\n".replace("-0", " a").replace("-1", " b"))
    assert [c.text for c in findings(run, observe(run, NOW)).stderr] == ["local b ended", "local a ended"]


def test_stderr_of_an_earlier_start_is_not_told_again(tmp_path: Path) -> None:
    run = Case(last=20).make(tmp_path / "run")
    run.node_err("local-0").write_text("then\nnow\n")
    state = run.read_json(run.node_state("local-0"))
    run.write_json(run.node_state("local-0"), state | {"err_begin": len("then\n")})
    assert [c.text for c in findings(run, observe(run, NOW)).stderr] == ["now"]


def test_of_a_long_stderr_the_end_is_told_in_whole_lines(tmp_path: Path) -> None:
    run = Case(last=20).make(tmp_path / "run")
    run.node_err("local-0").write_text("the beginning\n" + "like all\n" * STDERR_BYTES + "the end\n")
    told = findings(run, observe(run, NOW)).stderr
    assert [group.text for group in told] == ["like all", "the end"]


def test_what_the_agents_of_lost_nodes_printed_is_told(tmp_path: Path) -> None:
    run = Case([Node(beat=NOW - 99), None], last=20).make(tmp_path / "run")
    jobs = run.read_json(run.jobs)
    run.write_json(run.jobs, jobs | {"jobs": [{"id": "77", "pid": 77, "nodes": [0, 1]}]})
    os.utime(run.jobs, (NOW - 600, NOW - 600))
    run.submitit.mkdir()
    (run.submitit / "77_1_log.err").write_text("python: No such file or directory\n")
    found = findings(run, observe(run, NOW))
    assert as_text(found).endswith("    1 x python: No such file or directory (local-1)")
    assert as_json(found)["agents"] == [
        {"text": "python: No such file or directory", "count": 1, "nodes": ("local-1",)}
    ]


def test_what_agents_printed_is_not_told_while_they_live(tmp_path: Path) -> None:
    run = Case(last=20).make(tmp_path / "run")
    run.submitit.mkdir()
    (run.submitit / "77_1_log.err").write_text("odd\n")
    assert findings(run, observe(run, NOW)).agents == ()


@pytest.mark.parametrize("command", [["status"], ["runs"], ["logs"]], ids=" ".join)
def test_looking_at_a_run_imports_none_of_the_heavy_packages(tmp_path: Path, command: list[str]) -> None:
    Case([ended(0)] * 2, last=50).make(tmp_path / "tiny" / "run")
    code = f"""
import sys
from launch.cli import main
assert main({[*command, "--runs-dir", str(tmp_path)]!r}) == 0
print(sorted({{"hydra", "omegaconf", "torch", "submitit", "numpy", "rich"}} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"
