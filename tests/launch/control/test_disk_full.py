"""The disk of the run folder fills up while a run is at work."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.control.stop import stop
from launch.control.submit import resume
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from tests.support.launch.live import FOREVER, TWO_NODES, start, token, wait_for, wait_until_running


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        assert os.environ.get("CI") != "true"
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "fill").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_is_told(small_disk: Path) -> None:
    run = start(small_disk / "runs", *FOREVER, *TWO_NODES)
    wait_until_running(run)
    fill(small_disk)
    wait_for(lambda: not processes.find(token(run)), 60)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.failed, "disk-full"), verdict
    assert "the disk of the run folder is full" in verdict.reason
    assert not list(run.path.rglob("*.partial"))
    states = {path.name for path in run.nodes.iterdir()}
    assert not [name for name in states if name.startswith(".")], states


def test_on_a_full_disk_nothing_starts_and_what_runs_can_be_stopped(small_disk: Path) -> None:
    run = start(small_disk / "runs", *FOREVER)
    wait_until_running(run)
    fill(small_disk)
    assert stop(run).endswith("processes ended")
    assert not processes.find(token(run))
    before = sorted(small_disk.rglob("*"))
    told = rf"^{run.path}: cannot be written: No space left on device; free some space there, or choose another runs_"
    with pytest.raises(LaunchError, match=told):
        resume(run)
    with pytest.raises(LaunchError, match="cannot be written: No space left on device"):
        start(small_disk / "runs", "name=other")
    assert sorted(small_disk.rglob("*")) == before
