"""`import tdpp`: what the commands do, for notebooks and scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tdpp
from conf.compose import compose
from launch.judge.state import State
from tdpp.runs import launched
from tests.support import PATIENCE_S, ROOT
from tests.support.launch.live import FOREVER, WORKER, no_data_needed

STAND_IN = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import tdpp, tdpp.runs
from tests.support.launch.live import WORKER, no_data_needed
tdpp.launch = lambda words, wait=True: tdpp.runs.launched(words, wait, no_data_needed, WORKER)
"""
"""Its worker trains nothing, and needs no data."""


@pytest.mark.slow
def test_the_page_about_python_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    code = STAND_IN + "\n".join([*blocks, "assert len(losses) == 2"])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert "parallel.partition=1-2" in done.stdout
    assert done.stdout.rstrip().endswith(" ms")


def test_a_run_is_started_looked_at_and_stopped(runs: Path) -> None:
    run = launched([f"runs_dir={runs}", "train.log_interval=1", *FOREVER], False, no_data_needed, WORKER)
    assert run.path.is_dir()
    assert run.verdict.exit_code == 0
    with pytest.raises(TimeoutError, match="is not over after 0 s"):
        run.wait(0)
    assert run.stop().verdict.state is State.stopped
    assert run.stop().verdict.state is State.stopped
    found = tdpp.load(run.path.parent.name, runs)
    assert (found.path, found.name, found.plan) == (run.path, run.name, run.plan)


@pytest.mark.parametrize(
    "words",
    [["parallel.partition=1-2"], ["model=moon"], ["train.iteratons=5"], ["train.iterations=0"]],
    ids=["rule", "file", "key", "range"],
)
def test_errors_are_those_of_the_command_line(words: list[str]) -> None:
    with pytest.raises(tdpp.TdppError) as wanted:
        compose(words)
    with pytest.raises(type(wanted.value)) as found:
        tdpp.launch(words)
    assert str(found.value) == str(wanted.value)


def test_what_only_a_command_line_has_is_refused() -> None:
    with pytest.raises(tdpp.TdppError, match="-m: only the command 'tdpp launch' takes this; in Python, write a loop"):
        tdpp.launch(["-m", "model=tiny,small"])
    with pytest.raises(tdpp.TdppError, match=r"resume=a: only the command .*; continue the run in a shell"):
        tdpp.launch(["resume=a"])
    with pytest.raises(tdpp.TdppError, match="csv=… is for 'tdpp search' on the command line"):
        tdpp.search(["cluster=a10x8", "csv=a.csv"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model=tiny", "overrides='model=tiny' must be a list of words; write ['model=tiny']"),
        ({"model": "tiny"}, "overrides={'model': 'tiny'} must be a list of words KEY=VALUE, such as"),
        (None, "overrides=None must be a list of words KEY=VALUE"),
        (["model=tiny", 3], "overrides has 3, which must be a string KEY=VALUE"),
    ],
    ids=["text", "dict", "None", "number"],
)
@pytest.mark.parametrize("function", ["launch", "search", "compose"])
def test_overrides_that_are_no_list_of_texts_are_shown(function: str, overrides: object, message: str) -> None:
    with pytest.raises(tdpp.TdppError) as error:
        getattr(tdpp, function)(overrides)
    assert message in str(error.value)


def test_a_verdict_is_printed_in_a_line(runs: Path) -> None:
    run = launched([f"runs_dir={runs}", "train.iterations=6"], True, no_data_needed, WORKER)
    assert str(run.verdict) == "succeeded, 4 ranks exited with 0; iteration 6 of 6 logged"


def test_importing_it_is_quick() -> None:
    code = "import sys, tdpp; print([name for name in ('conf', 'launch', 'pandas', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
