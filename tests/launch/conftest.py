"""Fixtures for real runs: none may leave a process behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.machine import processes
from tests.support.launch.live import token


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs. After the test nothing of them lives, or the test has failed (and it is ended)."""
    folder = tmp_path / "runs"
    yield folder
    left = {}
    for path in folder.glob("*/*/jobs.json"):
        run = RunDir(path.parent)
        left[run.name] = processes.wait_until_gone(token(run), 30)
        processes.terminate(token(run), 0.1)
    shutil.rmtree(folder, ignore_errors=True)
    assert not any(left.values()), left
