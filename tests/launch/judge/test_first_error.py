"""The first error of a run that failed, and its remedy, are shown whole wherever a verdict is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch import cli
from launch.judge.findings import all_findings, findings
from launch.judge.status_text import as_text
from launch.observe.look import first_error, observe
from reports.sections.findings_section import verdict_section
from tests.support.launch.run_folders import NOW, Case, Node, ended

REMEDY = "set cluster.environment.GLOO_SOCKET_IFNAME (or that of the group of nodes) to one of these"
ERROR = (
    "GLOO_SOCKET_IFNAME=nope: gpu2-001 has no such interface with an IPv4 address; it has lo, eth0, ib0, docker0; and "
    f"a name may be longer than one thinks; {REMEDY}"
)
TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
    import nothing
ModuleNotFoundError: No module named 'nothing'
"""


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        (f"UserWarning: odd\n  warnings.warn(\nerror: {ERROR}\n", ERROR),
        (f"[rank 3 (stage 1, dp 0, tp 0)] error: {ERROR}\nerror: later\n", ERROR),
        (TRACEBACK, "ModuleNotFoundError: No module named 'nothing'"),
        (f"{TRACEBACK}srun: error: gpu2-001: task 0: Exited with exit code 1\n", "ModuleNotFoundError: No module "),
        ("nsys: no such command on gpu2-001\n", "nsys: no such command on gpu2-001"),
        ("UserWarning: odd\n", None),
        ("", None),
    ],
    ids=["ours", "of a rank", "a traceback", "the end of a step", "a command", "a warning", "nothing"],
)
def test_what_a_worker_said_of_its_end(stderr: str, error: str | None) -> None:
    found = first_error(stderr)
    assert found is None if error is None else (found or "").startswith(error)


def test_the_error_and_its_remedy_are_whole_in_status_runs_json_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(ERROR) > 160
    run = Case([Node(), ended(1)]).make(tmp_path / "runs" / "x" / "20260101-000000-a")
    run.node_err("local-1").write_text(f"error: {ERROR}\n")
    monkeypatch.chdir(tmp_path)
    found = findings(run, observe(run, NOW))
    reason = f"the worker of node local-1 exited with 1: {ERROR}"
    assert found.verdict.reason == reason
    assert f"1 x error: {ERROR} (local-1)" in as_text(found)
    assert ERROR in verdict_section(all_findings(run).verdict)
    for words in (["status", "x"], ["runs"], ["status", "x", "--json"], ["runs", "--json"]):
        cli.main(words)
        said = capsys.readouterr().out
        assert REMEDY in said, words
        if "--json" in words:
            content = json.loads(said)
            assert reason in (content if isinstance(content, dict) else content[0])["reason"]


def test_without_a_word_the_file_is_named_with_its_folder(tmp_path: Path) -> None:
    run = Case([Node(), ended(1)]).make(tmp_path / "run")
    reason = findings(run, observe(run, NOW)).verdict.reason
    assert reason == f"the worker of node local-1 exited with 1: see {tmp_path}{os.sep}run/nodes/local-1.err"
