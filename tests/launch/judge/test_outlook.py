"""When a run starts and ends: as far as that is known, and no further."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from launch.judge.progress import outlook
from launch.judge.state import State
from launch.judge.status_text import more_cells
from launch.judge.verdict import decide
from launch.observe.look import observe
from launch.observe.observation import Observation
from launch.screen import clock
from tests.launch.judge.test_slurm_verdict import seen_of
from tests.support.launch.run_folders import NOW, OK, Case, Error, Node, ended

DAY = 24 * 3600


def at(seconds: float) -> str:
    return datetime.fromtimestamp(NOW + seconds).strftime("%H:%M")


@pytest.mark.parametrize(
    ("case", "state", "text", "left_s"),
    [
        (Case(last=20), State.running, f"about 5 s left, ends {at(5)}", 5.0),
        (Case(last=20, loss=float("nan")), State.not_finite, f"about 5 s left, ends {at(5)}", 5.0),
        (Case(last=20, age=20), State.running, "due now", 0.0),
        (Case(), State.running, "", None),
        (
            Case([Node(started=NOW - 5)] * 2, last=20, age=9),
            State.running,
            "about 6 s left after it starts training",
            6.0,
        ),
        (Case(last=20, age=200), State.stalled, "no prediction while the run is stalled", None),
        (
            Case(errors=[Error(0, NOW - 3, "PeerLost", "lost rank 2", symptom=True)], last=20),
            State.failing,
            "no prediction while the run is failing",
            None,
        ),
        (Case(last=20, stop=NOW - 1), State.running, "", None),
        (Case([OK, OK], last=50), State.succeeded, f"ended {at(-5)}, 10 min after its start", None),
        (Case([ended(1), OK], last=20), State.failed, f"ended {at(-5)}, 10 min after its start", None),
        (Case([None, None], submitted=NOW - 9000), State.lost, "", None),
    ],
    ids=[
        *("running", "not finite", "overdue", "nothing logged", "resumed", "stalled", "failing", "stopping"),
        *("succeeded", "failed", "never started"),
    ],
)
def test_the_end_is_told_where_it_is_known(
    tmp_path: Path, case: Case, state: State, text: str, left_s: float | None
) -> None:
    nodes = [node and replace(node, started=node.started or NOW - 600) for node in case.nodes]
    seen = observe(replace(case, nodes=nodes).make(tmp_path / "run"), NOW)
    assert decide(seen).state is state
    found = outlook(seen, state)
    assert found.text == text
    assert found.left_s == (None if left_s is None else pytest.approx(left_s))


def queued(tmp_path: Path, *starts: float | None) -> Observation:
    """Both jobs wait; Slurm expects them to start so many seconds from now."""
    seen = seen_of(tmp_path, Case([None, None]), "PENDING", "PENDING")
    states = [
        job.state and replace(job.state, start_unix=s and NOW + s) for job, s in zip(seen.jobs, starts, strict=True)
    ]
    return replace(seen, jobs=tuple(replace(job, state=state) for job, state in zip(seen.jobs, states, strict=True)))


@pytest.mark.parametrize(
    ("starts", "text", "cell"),
    [
        ((600, 1200), f"Slurm expects to start its 2 jobs at {at(1200)}, in 20 min", f"starts {at(1200)}"),
        (
            (600, None),
            f"Slurm does not expect to start its 2 jobs before {at(600)}, in 10 min",
            f"starts after {at(600)}",
        ),
        ((None, None), "Slurm does not say yet when it expects to start its 2 jobs", "-"),
    ],
    ids=["both known", "one waits for the other", "unknown"],
)
def test_a_queued_run_starts_when_its_last_job_does(
    tmp_path: Path, starts: tuple[float | None, ...], text: str, cell: str
) -> None:
    seen = queued(tmp_path, *starts)
    assert outlook(seen, decide(seen).state).text == text
    assert f"start: {text}" in decide(seen).evidence
    assert more_cells(seen)[3] == cell


def test_a_time_of_another_day_has_its_day() -> None:
    now = datetime(2026, 11, 23, 14, 32).timestamp()
    assert [clock(now + shift, now) for shift in (60, DAY, -3 * DAY, 30 * DAY)] == [
        *("14:33", "Tue 14:32", "Fri 14:32", "2026-12-23 14:32")
    ]
