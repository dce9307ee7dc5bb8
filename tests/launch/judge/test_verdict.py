"""The rules by which a run is judged, each on a run folder made for it."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from launch.judge.state import EXIT_CODES, State
from launch.judge.verdict import decide, judge
from launch.node.peers import SILENCE_S
from launch.observe.look import observe
from tests.support import ROOT
from tests.support.launch.run_folders import EVALUATING, NOISE, NOW, OK, Case, Error, Node, ended

REACHED = {"iteration": 20, "ended_by": "until", "limit": "loss<=3.5", "value": 3.25}
SPENT = {"iteration": 22, "ended_by": "max_cost", "limit": "5", "value": 5.0123}
CASES = {
    "a-goal-that-was-reached-is-a-success": (
        Case([OK, OK], last=20, goal=REACHED, train=(*EVALUATING, "train.until=loss<=3.5")),
        State.succeeded, "4 ranks exited with 0 after iteration 20, which reached train.until=loss<=3.5: 3.25",
    ),
    "all-epochs-are-a-success": (
        Case([OK, OK], last=50, length={"epochs": 3, "samples": 810}),
        State.succeeded, "4 ranks exited with 0; iteration 50 of 50 logged: epoch 2.96 of 3",
    ),
    "all-samples-are-a-success": (
        Case([OK, OK], last=50, length={"samples": 1810}),
        State.succeeded, "iteration 50 of 50 logged: 800 of 1,810 samples",
    ),
    "a-part-of-the-epochs-is-none": (
        Case([OK, OK], last=45, length={"epochs": 3, "samples": 810}),
        State.incomplete, "the log ends at iteration 45 of 50",
    ),
    "a-part-of-the-samples-of-a-batch-that-adapts-is-none": (
        Case([OK, OK], last=45, length={"samples": 810}, adapt=NOISE),
        State.incomplete, "the log ends at iteration 45 of at most 50",
    ),
    "a-goal-that-the-log-does-not-show-is-none": (
        Case([OK, OK], last=15, goal=REACHED, train=(*EVALUATING, "train.until=loss<=3.5")),
        State.incomplete, "the log ends at iteration 15 of 20",
    ),
    "ranks-that-failed-after-the-goal-are-no-success": (
        Case([OK, ended(1)], last=20, goal=REACHED, train=(*EVALUATING, "train.until=loss<=3.5")),
        State.failed, "",
    ),
    "what-a-run-may-cost-was-spent": (
        Case([OK, OK], last=20, goal=SPENT),
        State.interrupted, "have cost $5.012 of train.max_cost=5; saved after iteration 22 of 50; to continue",
    ),
    "an-evaluation-may-take-longer-than-iterations": (
        Case(last=15, age=100, train=EVALUATING), State.running, "4 ranks at work",
    ),
    "a-line-without-an-evaluation-is-late-all-the-same": (
        Case(last=20, age=100, train=EVALUATING), State.stalled, "no iteration logged for 100 s",
    ),
    "an-evaluation-takes-about-as-long-as-those-before": (
        Case(last=25, age=100, train=EVALUATING, evaluated={10: 2.0, 20: 2.0}),
        State.stalled, "no iteration logged for 100 s",
    ),
    "ranks-that-were-killed-with-their-node-did-not-fail-by-themselves": (
        Case([ended(-15, "SIGTERM"), ended(143, "SIGTERM")], [Error(0, NOW - 6, "Killed", "killed by SIGTERM")]),
        State.failed, "was ended from outside by SIGTERM",
    ),
    "a-rank-that-somebody-ended-is-named": (
        Case([ended(1), ended(143, "SIGTERM")], [Error(0, NOW - 6, "Killed", "killed by SIGTERM")]),
        State.failed, "rank 0 (stage 0, dp 0, tp 0, node local-0) was killed by SIGTERM",
    ),
    "all-ended-well-and-the-last-iteration-is-logged": (
        Case([OK, OK], last=50),
        State.succeeded, "4 ranks exited with 0; iteration 50 of 50 logged",
    ),
    "exit-code-0-is-not-enough": (
        Case([OK, OK], last=45),
        State.incomplete, "the log ends at iteration 45 of 50",
    ),
    "exit-code-0-without-a-log": (Case([OK, OK]), State.incomplete, "the log ends at iteration 0 of 50"),
    "the-last-iteration-is-not-enough": (
        Case([OK, ended(1)], last=50),
        State.failed, "the worker of node local-1 exited with 1: see ",
    ),
    "at-work": (Case(last=20), State.running, "4 ranks at work"),
    "the-last-iteration-is-logged-but-the-checkpoint-takes-long": (
        Case(last=50, age=500), State.running, "4 ranks at work"
    ),
    "nothing-told-yet": (Case([None, None], submitted=NOW - 2), State.starting, "waiting for its nodes"),
    "a-container-is-made-ready": (
        Case([Node("preparing", doing="enroot create -n a b.sqsh"), None], submitted=NOW - 2),
        State.starting, "node local-0 prepares its container, waiting for enroot create -n a b.sqsh",
    ),
    "a-container-cannot-be-made-ready": (
        Case([
            Node("ended", 1, ended=NOW - 5, reason="could not: its last output:\n  no"),
            Node("ended", 143, "SIGTERM", ended=NOW - 4, reason="ended because node local-0 failed"),
        ]),
        State.failed, "node local-0 could not: its last output:\n  no",
    ),
    "never-told-anything": (
        Case([None, None], submitted=NOW - SILENCE_S - 1), State.lost, "node local-0 was never started"
    ),
    "one-node-never-told-anything": (
        Case([Node(), None]), State.lost, "node local-1 was never started"
    ),
    "silent": (
        Case([Node(), Node(beat=NOW - SILENCE_S - 1)], last=20), State.lost, "the agent of node local-1"
    ),
    "a-rank-raised": (
        Case([ended(1), ended(143, "SIGTERM")], [Error(1, NOW - 9, message="boom\ndetail")], last=20),
        State.failed, "rank 1 (stage 0, dp 1, tp 0, node local-0) failed with RuntimeError: boom; detail",
    ),
    "a-rank-raised-and-the-others-still-end": (
        Case([Node(), Node()], [Error(1, NOW - 1)], last=20), State.failed, "rank 1 "
    ),
    "until-all-have-told-what-followed-is-not-taken-for-the-cause": (
        Case([Node(), Node()], [Error(0, NOW - 1, "PeerLost", "lost rank 2", symptom=True)], last=20),
        State.failing, "rank 0 (stage 0, dp 0, tp 0, node local-0) failed with PeerLost: lost rank 2; the cause is not",
    ),
    "a-killed-rank-whose-node-may-be-ending-with-it": (
        Case([Node(), Node()], [Error(3, NOW - 1, "Killed", "killed by SIGKILL: by somebody")], last=20),
        State.failing, "rank 3 (stage 1, dp 1, tp 0, node local-1) was killed by SIGKILL: by somebody; it is not "
                       "known yet",
    ),
    "a-killed-rank-that-may-have-brought-about-what-came-later": (
        Case([Node(), Node()], [Error(3, NOW - 2, "Killed", "killed by SIGKILL"), Error(0, NOW - 1)], last=20),
        State.failing, "rank 3 ",
    ),
    "a-killed-rank-that-came-after-the-cause": (
        Case([Node(), Node()], [Error(3, NOW - 1, "Killed", "killed by SIGKILL"), Error(0, NOW - 2)], last=20),
        State.failed, "rank 0 ",
    ),
    "a-rank-that-crashed-did-so-by-itself": (
        Case([Node(), Node()], [Error(3, NOW - 1, "Killed", "killed by SIGSEGV")], last=20), State.failed, "rank 3 "
    ),
    "a-killed-rank-of-a-node-that-is-gone-was-killed-with-it": (
        Case([Node(), Node(beat=NOW - 99)], [Error(3, NOW - 98, "Killed", "killed by SIGKILL")], last=20),
        State.lost, "the agent of node local-1 (process 1) is gone and left no result",
    ),
    "a-rank-that-was-killed-after-its-node-was-told-to-end": (
        Case(
            [replace(ended(143, "SIGTERM"), stopped_unix=NOW - 40), ended(143, "SIGTERM", NOW - 4)],
            [Error(0, NOW - 10, "Killed", "killed by SIGKILL: by somebody")],
        ),
        State.failed, "node local-0 was ended from outside by SIGTERM",
    ),
    "a-rank-that-the-signal-for-all-reached-before-its-agent": (
        Case(
            [replace(ended(143, "SIGTERM"), stopped_unix=NOW - 9), ended(143, "SIGTERM", NOW - 4)],
            [Error(0, NOW - 10, "Killed", "killed by SIGTERM")],
        ),
        State.failed, "node local-0 was ended from outside by SIGTERM",
    ),
    "a-rank-that-was-killed-before-its-node-was-told-to-end": (
        Case(
            [replace(ended(143, "SIGTERM"), stopped_unix=NOW - 6), ended(143, "SIGTERM", NOW - 4)],
            [Error(0, NOW - 10, "Killed", "killed by SIGKILL: by somebody")],
        ),
        State.failed, "rank 0 (stage 0, dp 0, tp 0, node local-0) was killed by SIGKILL",
    ),
    "a-killed-rank-of-a-node-that-followed-another": (
        Case(
            [
                Node("ended", 1, "SIGTERM", NOW - 9, ended=NOW - 8, reason="ended because node local-1 failed"),
                ended(1),
            ],
            [Error(0, NOW - 10, "Killed", "killed by SIGKILL"), Error(3, NOW - 9.5)],
        ),
        State.failed, "rank 0 (stage 0, dp 0, tp 0, node local-0) was killed by SIGKILL",
    ),
    "a-rank-that-was-killed-while-it-saved": (
        Case(
            [ended(1, "SIGUSR2"), ended(143, "SIGTERM", reason="ended because node local-0 failed")],
            [Error(0, NOW - 6, "Killed", "killed by SIGKILL")],
        ),
        State.failed, "rank 0 (stage 0, dp 0, tp 0, node local-0) was killed by SIGKILL",
    ),
    "a-node-was-ended-and-the-others-have-not-noticed": (
        Case([Node(), ended(143, "SIGTERM")], last=20),
        State.failing, "node local-1 was ended from outside by SIGTERM; it is not known yet whether it is",
    ),
    "a-node-has-saved-and-the-other-one-still-saves": (
        Case([Node(), ended(75, "SIGUSR2")], last=20), State.running, "4 ranks at work",
    ),
    "a-node-gave-up-and-the-others-have-not-noticed": (
        Case([Node(), ended(143, "SIGTERM", reason="ended because node local-0 was lost")], last=20),
        State.failing, "node local-1 ended because node local-0 was lost",
    ),
    "the-earliest-of-several-causes": (
        Case([ended(1), ended(1)], [Error(0, NOW - 8), Error(3, NOW - 9)]), State.failed, "rank 3 "
    ),
    "symptoms-may-be-written-first": (
        Case([ended(1), ended(1)], [Error(0, NOW - 9, "PeerLost", symptom=True), Error(3, NOW - 8)]),
        State.failed, "rank 3 ",
    ),
    "only-symptoms": (
        Case([ended(1), ended(1)], [Error(0, NOW - 9, "PeerLost", "lost rank 2", symptom=True)]),
        State.failed, "the worker of node local-1 exited with 1",
    ),
    "only-symptoms-on-every-node": (
        Case([ended(1), ended(1)], [Error(r, NOW - 9 + r, "PeerLost", "gone", symptom=True) for r in (0, 2)]),
        State.failed, "rank 0 (stage 0, dp 0, tp 0, node local-0) failed with PeerLost: gone; no rank recorded",
    ),
    "a-rank-was-killed": (
        Case([ended(1), ended(1)], [Error(2, NOW - 9, "Killed", "killed by SIGKILL")]),
        State.failed, "rank 2 (stage 1, dp 0, tp 0, node local-1) was killed by SIGKILL",
    ),
    "a-worker-was-killed-before-the-ranks-noticed": (
        Case([ended(-9, at=NOW - 8), ended(1)], [Error(2, NOW - 7, "PeerLost", symptom=True)]),
        State.failed, "the worker of node local-0 was killed by SIGKILL",
    ),
    "a-worker-was-killed-by-a-signal-without-a-name": (
        Case([ended(-200), ended(143, "SIGTERM")]), State.failed, "killed by signal 200"
    ),
    "a-worker-that-was-told-to-end-is-no-cause": (
        Case([ended(-9, "SIGTERM", NOW - 8), ended(1, at=NOW - 7)]), State.failed, "the worker of node local-1"
    ),
    "a-lost-agent-explains-the-symptoms": (
        Case([Node(beat=NOW - 99), ended(1, at=NOW - 90)], [Error(2, NOW - 91, "PeerLost", symptom=True)]),
        State.lost, "the agent of node local-0 (process 1) is gone",
    ),
    "stopped": (Case([ended(143, "SIGTERM")] * 2, last=20, stop=NOW - 9), State.stopped, "ended on request"),
    "stopping": (Case([ended(143, "SIGTERM"), Node()], last=20, stop=NOW - 9), State.running, "asked to stop"),
    "stopped-but-its-agents-had-to-be-killed": (
        Case([Node(beat=NOW - 99)] * 2, stop=NOW - 98), State.stopped, "ended on request"
    ),
    "stopped-before-it-started": (Case([None, None], stop=NOW - 100), State.stopped, "ended on request"),
    "it-failed-before-it-was-stopped": (
        Case([ended(1), ended(143, "SIGTERM")], [Error(0, NOW - 10)], stop=NOW - 9), State.failed, "rank 0 "
    ),
    "errors-after-the-stop-follow-from-it": (
        Case([ended(1)] * 2, [Error(0, NOW - 8)], stop=NOW - 9), State.stopped, "ended on request"
    ),
    "it-had-finished-when-it-was-stopped": (Case([OK, OK], last=50, stop=NOW - 4), State.succeeded, "4 ranks exited"),
    "ended-by-somebody-else": (
        Case([ended(143, "SIGTERM", NOW - 6), ended(143, "SIGTERM")]),
        State.failed, "node local-0 was ended from outside by SIGTERM",
    ),
    "started-again-too-often": (
        Case([ended(143, reason="was restarted more often than executor.max_requeues=3 allows")] * 2, last=20),
        State.failed, "node local-0 was restarted more often than executor.max_requeues=3 allows",
    ),
    "time-limit": (Case([ended(143, "SIGUSR2")] * 2, last=20), State.failed, "executor.time_min"),
    "loss-not-a-number": (Case(last=20, loss=math.nan), State.not_finite, "the loss of iteration 20 is nan"),
    "loss-infinite-at-the-end": (Case([OK, OK], last=50, loss=math.inf), State.not_finite, "iteration 50 is inf"),
    "stalled": (Case(last=20, age=31), State.stalled, "no iteration logged for 31 s; usually one takes 1.0 s"),
    "a-node-has-not-started-yet": (
        Case([Node(), None], submitted=NOW - 5), State.starting, "1 of 2 nodes at work, waiting for its nodes to start"
    ),
    "one-node-is-done-before-the-other": (Case([OK, Node()], last=50), State.running, "4 ranks at work"),
    "slow-but-not-stalled": (Case(last=20, age=29), State.running, "4 ranks at work"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "state", "reason"), CASES.values(), ids=CASES.keys())
def test_a_run_is_judged(tmp_path: Path, case: Case, state: State, reason: str) -> None:
    verdict = judge(case.make(tmp_path / "run"), NOW)
    assert verdict.state == state
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("ago", "state"), [(250, State.running), (301, State.stalled)], ids=["it-may-still-be-starting", "too-long"]
)
def test_what_an_earlier_start_logged_hours_ago_does_not_make_a_run_stall(
    tmp_path: Path, ago: float, state: State
) -> None:
    nodes: list[Node | None] = [Node(started=NOW - ago - 5), Node(started=NOW - ago)]
    verdict = judge(Case(nodes, last=20, age=4 * 3600).make(tmp_path / "run"), NOW)
    assert verdict.state == state
    if state is State.stalled:
        assert "no iteration logged for 301 s since the run was started again" in verdict.reason


def test_after_its_first_new_line_a_run_that_was_started_again_is_judged_by_its_pace(tmp_path: Path) -> None:
    nodes: list[Node | None] = [Node(started=NOW - 90)] * 2
    assert judge(Case(nodes, last=20, age=31).make(tmp_path / "run"), NOW).state is State.stalled


def test_a_run_that_was_resumed_on_another_machine_is_not_lost_where_it_began(tmp_path: Path) -> None:
    run = Case(last=20).make(tmp_path / "run")
    run.write_json(run.provenance, {"host": socket.gethostname()})
    assert judge(run, NOW).state is State.lost
    job = {"id": "1", "pid": 1, "host": f"not-{socket.gethostname()}", "nodes": [0, 1]}
    run.write_json(run.jobs, {**run.read_json(run.jobs), "submission": 0, "jobs": [job]})
    assert judge(run, NOW).state is State.running


def test_a_slow_runs_pace_sets_its_own_limit(tmp_path: Path) -> None:
    seen = observe(Case(last=20, age=60).make(tmp_path / "run"), NOW)
    slow = replace(seen, times=tuple(replace(line, elapsed_ms=4_000.0) for line in seen.times))
    assert decide(seen).state == State.stalled
    assert decide(slow).state == State.running


def test_that_a_run_was_asked_to_stop_is_known_whatever_the_request_holds(tmp_path: Path) -> None:
    run = Case([ended(1, "SIGTERM"), ended(1, "SIGTERM")]).make(tmp_path / "run")
    run.stop_request.write_text("{}")
    assert judge(run, NOW).state is State.stopped


def test_every_state_has_an_exit_code_and_the_documentation_tells_it() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    for state in State:
        rows = [row.split("|") for row in page.splitlines() if row.startswith("|")]
        assert [int(row[1]) for row in rows if state in row[2].strip().split(", ")] == [EXIT_CODES[state]]
