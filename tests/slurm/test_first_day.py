"""The first day of a new user on a real cluster: every command of docs/first-day.md, in an empty account."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conf import compose as composing_module
from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch import cli
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


@pytest.fixture
def empty_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user who has no configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TDPP_CONFIG", raising=False)
    monkeypatch.setattr(composing_module, "_composed", COMPOSED)  # what is read changes from test to test
    return tmp_path


def test_the_page_leads_from_an_empty_account_to_the_best_plan(slurm: Cluster, empty_account: Path) -> None:
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


def test_nodes_of_a_partition_that_is_not_up_are_taken_from_another_one(
    slurm: Cluster, empty_account: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with partition(slurm, "hgx", "State=INACTIVE", "State=UP"):
        assert cli.main(["init", "--wait=600"]) == 0, capfd.readouterr().err
    groups = compose(["experiment=mine"]).cluster.groups
    assert {name: (group.count, group.partition) for name, group in groups.items()} == {
        "gpu2": (7, "gpu2"),
        "scavenge": (1, "scavenge"),
    }


def test_a_partition_that_refuses_the_users_jobs_is_left_out(
    slurm: Cluster, empty_account: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = Path(slurm.env["SLURM_CONF"])
    text = config.read_text()
    config.write_text(f"{text}EnforcePartLimits=ALL\n")  # where nothing is said, such a job waits for ever
    try:
        assert slurm.run("scontrol", "reconfigure").returncode == 0
        refused = "Slurm refuses your jobs in partition {}: Invalid account or account/partition combination specified"
        with partition(slurm, "hgx", "AllowAccounts=others", "AllowAccounts=ALL"):
            assert cli.main(["init", "--wait=600"]) == 0, capfd.readouterr().err
            assert f"(hgx: {refused.format('hgx')})" in capfd.readouterr().err
            assert list(compose(["experiment=mine"]).cluster.groups) == ["gpu2"]
            with partition(slurm, "gpu2", "AllowAccounts=others", "AllowAccounts=ALL"):
                assert cli.main(["init", "again", "--wait=600"]) == 1
        told = capfd.readouterr().err
        assert f"gpu2: {refused.format('gpu2')}; hgx: {refused.format('hgx')}; ask your administrator" in told
        assert "--account and --qos" in told
        assert not list(empty_account.rglob("again.yaml"))
    finally:
        config.write_text(text)
        slurm.run("scontrol", "reconfigure")


@contextmanager
def partition(slurm: Cluster, name: str, change: str, back: str) -> Iterator[None]:
    """A partition that an administrator has changed."""
    assert slurm.run("scontrol", "update", f"partitionname={name}", change).returncode == 0
    try:
        yield
    finally:
        slurm.run("scontrol", "update", f"partitionname={name}", back)
