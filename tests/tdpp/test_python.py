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
    with pytest.raises(tdpp.TdppError, match="-m: 'tdpp launch' alone takes this"):
        tdpp.launch(["-m", "model=tiny,small"])
    with pytest.raises(tdpp.TdppError, match="csv=… is for 'tdpp search' on the command line"):
        tdpp.search(["cluster=a10x8", "csv=a.csv"])


def test_importing_it_is_quick() -> None:
    code = "import sys, tdpp; print([name for name in ('conf', 'launch', 'pandas', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
