"""No command leaves a temporary folder, even one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.reading import files
from conf.reading.files import PREFIX, Scratch
from tests.support import ROOT
from tests.support.ordinary_user import NOBODY, only_root_is_two_users

HELD = """
import sys, time
from conf.reading.files import Scratch
with Scratch() as folder:
    print(folder.path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(files, "YOUNG_S", -1.0)
    return tmp_path


def test_a_folder_is_made_when_it_is_asked_for_and_gone_afterwards(temporary: Path) -> None:
    with Scratch() as folder:
        assert folder.files == []
        assert list(temporary.iterdir()) == []
        (folder.path / "a").touch()
        assert folder.files == [folder.path / "a"]
        assert [path.name.startswith(PREFIX) for path in temporary.iterdir()] == [True]
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_and_what_another_uses_is_not(temporary: Path) -> None:
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    held = [
        subprocess.Popen([sys.executable, "-c", HELD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(process.stdout.readline().strip()) for process in held if process.stdout]
    held[0].send_signal(signal.SIGKILL)
    held[0].wait()
    assert all(folder.is_dir() for folder in folders)
    with Scratch() as folder:
        assert folder.path.is_dir()
    assert [folder.is_dir() for folder in folders] == [False, True]
    held[1].kill()
    held[1].wait()


def test_a_folder_that_was_just_made_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "YOUNG_S", 60.0)
    young, old = temporary / f"{PREFIX}young", temporary / f"{PREFIX}old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (time.time() - 100,) * 2)
    with Scratch() as folder:
        assert folder.path.is_dir()  # type: ignore[attr-defined]
    assert list(temporary.iterdir()) == [young]


@only_root_is_two_users
def test_nothing_of_another_user_and_nothing_behind_a_link_is_cleared(temporary: Path) -> None:
    foreign, kept = temporary / f"{PREFIX}foreign", temporary / "kept"
    for folder in (foreign, kept):
        folder.mkdir()
    os.chown(foreign, NOBODY, NOBODY)
    (temporary / f"{PREFIX}link").symlink_to(kept)
    with Scratch() as folder:
        assert folder.path.is_dir()  # type: ignore[attr-defined]
    assert foreign.is_dir()
    assert kept.is_dir()
