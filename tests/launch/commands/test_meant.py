"""`tdpp launch` alone is the demo, unless one has a cluster of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import UsageError
from launch.commands.launching.resolve_auto import require_choice
from launch.judge.state import State, next_step
from tests.support import ROOT


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TDPP_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    return tmp_path / "conf"


@pytest.mark.parametrize("words", [[], ["-m"]], ids=["alone", "sweep"])
def test_who_has_a_cluster_is_asked_what_to_launch(own: Path, words: list[str]) -> None:
    require_choice(words)
    (own / "cluster" / "ours.yaml").touch()
    with pytest.raises(UsageError, match=r"use cluster=ours model=NAME data=NAME for .* \(ours\), or experiment=demo"):
        require_choice(words)
    (own / "experiment").mkdir()
    (own / "experiment" / "first.yaml").touch()
    with pytest.raises(UsageError, match=r"use experiment=first for your own cluster \(ours\)"):
        require_choice(words)


@pytest.mark.parametrize("word", ["experiment=demo", "train.lr=1e-3", "dry_run=true", "--cfg=job", "--help"])
def test_who_says_anything_is_not_asked(own: Path, word: str) -> None:
    (own / "cluster" / "ours.yaml").touch()
    require_choice([word])


@pytest.mark.parametrize(
    ("state", "command"),
    [
        (State.succeeded, "tdpp report 'my run/1'  #"),
        (State.running, "tdpp status 'my run/1' --watch  #"),
        (State.failed, "tdpp status 'my run/1'  #"),
    ],
)
def test_the_next_step_follows_from_the_verdict(state: State, command: str) -> None:
    assert next_step(state, "my run/1").startswith(command)


def test_the_package_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "tdpp", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:5]) == (0, "tdpp ")


def test_a_user_s_folders_are_not_taken_for_packages_of_tdpp(tmp_path: Path) -> None:
    """`conf` is where every command looks for a user's files, and `reports` a common name."""
    for name in ("conf", "reports", "launch"):
        (tmp_path / name).mkdir()
    program = "import reports; from conf.compose import compose; print(compose().model.name, reports.load.__name__)"
    for words, printed in ((["-m", "tdpp", "launch", "--cfg", "job"], "${model.name}"), (["-c", program], "tiny load")):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        assert printed in done.stdout, done.stderr
