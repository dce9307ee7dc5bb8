"""Where a run comes from is recorded, with and without git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.machine import provenance
from launch.machine.provenance import read_source


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(provenance, "PROJECT", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    (tmp_path / "a.py").write_text("old\n")
    for command in ("init -q", "add a.py", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_the_diff_restores_what_ran(repository: Path) -> None:
    (repository / "a.py").write_text("new")
    diff = read_source().diff
    subprocess.run(["git", "checkout", "-q", "a.py"], cwd=repository, check=True)
    subprocess.run(["git", "apply"], cwd=repository, input=diff, text=True, check=True)
    assert (repository / "a.py").read_text() == "new"


def test_commit_and_changed_files_are_recorded(repository: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    (repository / "b.py").touch()
    told = provenance.provenance(read_source())
    assert (told["commit"], told["changed"]) == (head.stdout.strip(), ["?? b.py"])


def test_without_a_repository_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PROJECT", tmp_path)
    source = read_source()
    told = provenance.provenance(source)
    assert (told["commit"], told["changed"], source.diff) == (None, None, "")


def test_without_git_nothing_is_claimed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.provenance(read_source())["commit"] is None
