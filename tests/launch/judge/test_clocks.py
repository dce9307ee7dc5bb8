"""Ages follow one clock: neither a clock that is set, nor one that is wrong, makes a run stall."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.files.records import NodeState, Start
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support.launch import run_folders
from tests.support.launch.run_folders import Case, Node


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """Cases are of this moment."""
    now = time.time()
    monkeypatch.setattr(run_folders, "NOW", now)
    return now


def at_work(path: Path, now: float, ahead_s: float, age_s: float = 2.0) -> RunDir:
    """The clock of the node that logs is ahead."""
    run = Case(
        [Node(beat=now, started=now - 9000), Node(beat=now + ahead_s, started=now - 9000 + ahead_s)],
        last=20,
        age=age_s - ahead_s,
    ).make(path)
    for node in ("local-0", "local-1"):
        os.utime(run.node_state(node), (now, now))
    return run


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [(-3600, "60 min behind"), (3600, "60 min ahead of"), (300, "5 min ahead of"), (1, None)],
    ids=["behind", "ahead", "somewhat ahead", "as usual"],
)
def test_a_node_whose_clock_is_wrong_is_at_work(tmp_path: Path, now: float, ahead_s: float, words: str | None) -> None:
    verdict = judge(at_work(tmp_path / "run", now, ahead_s))
    assert (verdict.state, verdict.reason) == (State.running, "4 ranks at work")
    assert any(re.search(r", logged \d+ s ago$", line) for line in verdict.evidence)
    clocks = [line for line in verdict.evidence if line.startswith("clock: ")]
    assert clocks == ([f"clock: that of node local-1 is {words} the file system's of the run"] if words else [])


@pytest.mark.parametrize("ahead_s", [-3600, 3600], ids=["behind", "ahead"])
def test_a_run_that_stalls_does_so_by_a_wrong_clock_too(tmp_path: Path, now: float, ahead_s: float) -> None:
    assert judge(at_work(tmp_path / "run", now, ahead_s, age_s=300)).state is State.stalled


def test_a_clock_set_forward_does_not_age_what_was_logged_before(
    tmp_path: Path, now: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = at_work(tmp_path / "run", now, ahead_s=0, age_s=3600 + 5)
    run.node_state("local-1").unlink()
    assert judge(run).state is not State.running
    with monkeypatch.context() as before:
        before.setattr(time, "time", lambda: now - 3600)
        state = NodeState(run, "local-1", 1, Start.parse("0.0"), None)
    state.publish(state="running")
    verdict = judge(run)
    assert (verdict.state, verdict.reason) == (State.running, "4 ranks at work")
    said = "clock: that of node local-1 was set forward by 60 min, at "
    assert any(line.startswith(said) for line in verdict.evidence)
