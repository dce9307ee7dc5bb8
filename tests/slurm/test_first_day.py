"""The first day of a new user on a real cluster: every command of docs/first-day.md, in an empty account."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conf import compose as composing_module
from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support import ROOT
from tests.support.composing import COMPOSED
from tests.support.launch.live import ENVIRONMENT
from tests.support.slurm.cluster import Cluster

PAGE = (ROOT / "docs" / "first-day.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SHORTER = {
    "init": ["--wait=600", "--price", "hgx=12.24"],
    "launch": ["train.iterations=10"],
    "profile": ["seconds=0.2"],
}
"""What the test adds to the page's commands, so that they take less time and more patience."""
ENDED_S = 1200
"""So long a command may take on a busy machine."""


def test_the_page_leads_from_an_empty_account_to_the_best_plan(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TDPP_CONFIG", raising=False)
    monkeypatch.setattr(composing_module, "_composed", COMPOSED)  # what is read changes from test to test
    assert [shlex.split(command)[1] for command in COMMANDS] == [
        *("init", "data", "doctor", "launch", "status", "report"),
        *("profile", "search", "launch", "status", "report"),
    ]
    told = {}
    for command in COMMANDS:
        words = shlex.split(command)
        options = SHORTER.get(words[1], [])
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", *words[1:], *options],
            env={**os.environ, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENDED_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        told[words[1]] = done
    groups = compose(["experiment=mine"]).cluster.groups
    assert {name: (group.count, group.partition, group.gres, group.gpu) for name, group in groups.items()} == {
        "hgx": (1, "hgx", "gpu:a100:4", "cpu"),
        "gpu2": (7, "gpu2", "gpu:a10:4", "cpu"),
    }
    assert groups["hgx"].price_per_hour == 12.24
    assert "Slurm lists gpu:a100:4 here, but ranks will run on the CPU: no GPU on " in told["init"].stderr
    runs = list(RunDir.all(Path("runs")))
    assert [judge(run).state for run in runs] == [State.succeeded] * 2
    first, best = (run.read_plan() for run in runs)
    assert [node.group for node in first.nodes] == ["gpu2", "hgx"]
    assert len(best.ranks) >= 2
    assert Path("config/tdpp/parallel/best.yaml").exists()
    assert slurm.jobs() == []
