"""The rules by which a run is judged, each on a run folder made for it."""

from __future__ import annotations

import io
import json
import math
import os
import socket
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.status_display import runs_screen
from launch.control.planning.plan import make_plan
from launch.judge.findings import findings
from launch.judge.progress import time_of
from launch.judge.state import EXIT_CODES, State
from launch.judge.status_text import COLUMNS, MORE_COLUMNS, as_json, as_text, more_cells, run_row
from launch.judge.verdict import decide, judge
from launch.node.peers import SILENCE_S
from launch.observe.look import observe
from megatron_ext.contract.adaptive.config import AdaptConfig
from tests.support import ROOT
from tests.support.launch.live import TWO_NODES

A10 = ("experiment=seed_a10x8", "executor=local", "container=none")
NOW = 1_000_000.0
ITERATIONS = 50


@dataclass
class Node:
    """nodes/<node>.json, by default of a node at work."""

    state: str = "running"
    exit_code: int | None = None
    stopped: str | None = None
    stopped_unix: float | None = None
    beat: float = NOW - 1
    ended: float | None = None
    started: float = 0.0
    reason: str | None = None
    doing: str | None = None
    withdrew: tuple[str, ...] = ()


OK = Node("ended", 0, ended=NOW - 5)


def ended(code: int, stopped: str | None = None, at: float = NOW - 5, reason: str | None = None) -> Node:
    return Node("ended", code, stopped, ended=at, reason=reason)


@dataclass
class Error:
    """errors/rank-*.json."""

    rank: int
    unix: float
    type: str = "RuntimeError"
    message: str = "boom"
    symptom: bool = False


@dataclass
class Case:
    """A run of two nodes with two ranks each, on a machine that this one cannot look into."""

    nodes: list[Node | None] = field(default_factory=lambda: [Node(), Node()])
    errors: list[Error] = field(default_factory=list)
    last: int = 0
    """The last logged iteration; there is a line for every fifth, one second each."""
    age: float = 1.0
    """Seconds since the last line."""
    loss: float | None = 4.0
    stop: float | None = None
    submitted: float = NOW - 600
    """For the last time."""
    train: tuple[str, ...] = ()
    """Overrides."""
    goal: dict[str, object] | None = None
    """goal.json."""
    evaluated: dict[int, float] = field(default_factory=dict)
    """How long evaluations took, by iteration."""
    length: dict[str, int] = field(default_factory=dict)
    """What plan.json says of it beside its iterations."""
    adapt: AdaptConfig | None = None

    def make(self, path: Path) -> RunDir:
        run = RunDir(path)
        for folder in (run.nodes, run.errors):
            folder.mkdir(parents=True)
        plan = make_plan(
            compose([*TWO_NODES, "train.iterations=50", "train.log_interval=5", *self.train]), "tiny/run"
        ).as_json()
        plan["train"] |= self.length
        if self.adapt is not None:
            plan["adapt"] = asdict(self.adapt)
        run.config.touch()
        run.write_json(run.plan, plan)
        os.utime(run.plan, (NOW - 9000, NOW - 9000))
        run.write_json(run.provenance, {"host": f"not-{socket.gethostname()}"})
        run.write_json(run.jobs, {"token": "t", "executor": "local", "submission": 0, "jobs": []})
        os.utime(run.jobs, (self.submitted, self.submitted))
        for rank, (place, node) in enumerate(zip(plan["nodes"], self.nodes, strict=True)):
            if node is not None:
                self._write_node(run, place["name"], rank, node)
        for error in self.errors:
            place = plan["ranks"][error.rank]
            node = plan["nodes"][place["node"]]["name"]
            run.write_json(
                run.rank_error(error.rank), place | vars(error) | {"start": "0.0", "node": node, "traceback": ""}
            )
        lines = range(5, self.last + 1, 5)
        run.metrics.write_text("".join(self._line(iteration) for iteration in lines))
        if self.goal is not None:
            run.write_json(run.goal, self.goal)
        if self.stop is not None:
            run.write_json(run.stop_request, {"unix": self.stop})
        return run

    def _write_node(self, run: RunDir, name: str, rank: int, node: Node) -> None:
        content = {
            "node": name,
            "node_rank": rank,
            "pid": 1,
            "started_unix": node.started,
            "state": node.state,
        }
        content |= {"beat_unix": node.beat, "ended_unix": node.ended, "exit_code": node.exit_code}
        content |= {"start": "0.0", "job": None, "doing": node.doing, "reason": node.reason, "stopped": node.stopped}
        content |= {"stopped_unix": node.stopped_unix, "withdrew": node.withdrew, "out_begin": 0, "err_begin": 0}
        run.write_json(run.node_state(name), content)
        os.utime(run.node_state(name), (node.beat, node.beat))

    def _line(self, iteration: int) -> str:
        unix = NOW - self.age - (self.last - iteration)
        values = {"iteration": iteration, "unix": unix, "elapsed_ms": 200.0, "loss": self.loss, "nan": 0}
        values["consumed_samples"] = 16 * iteration
        if iteration in self.evaluated:
            values |= {"evaluation_s": self.evaluated[iteration], "valid_loss": 3.25}
        return json.dumps(values) + "\n"


REACHED = {"iteration": 20, "ended_by": "until", "limit": "loss<=3.5", "value": 3.25}
TRAINED = {"iteration": 20, "ended_by": "samples", "limit": "320", "value": 320}
SPENT = {"iteration": 22, "ended_by": "max_cost", "limit": "5", "value": 5.0123}
EVALUATING = ("train.eval_interval=10",)
NOISE = AdaptConfig("noise", 0.3, 8, 640, 100, 0.1, 4, "sqrt", rebalance=False)
SPEED = "200.0 ms per iteration (median), 80.0 samples/s at the newest batch, logged"
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


def test_the_evidence_counts_symptoms_and_names_later_causes(tmp_path: Path) -> None:
    errors = [
        Error(0, NOW - 9),
        Error(3, NOW - 8, message="bang"),
        Error(1, NOW - 7, symptom=True),
        Error(2, NOW - 7, symptom=True),
    ]
    verdict = judge(Case([ended(1), ended(1)], errors, last=20).make(tmp_path / "run"), NOW)
    assert "2 ranks failed only because another one was lost" in verdict.evidence
    assert any(line.startswith("later: rank 3 ") for line in verdict.evidence)
    assert "iteration: 20 of 50, loss 4.0000, 200.0 ms per iteration (median), logged 1 s ago" in verdict.evidence


@pytest.mark.parametrize(
    ("messages", "told", "later"),
    [
        (["boom"] * 4, "boom (also all 3 other ranks)", []),
        (["boom", None, "boom", "boom"], "boom (also ranks 2-3)", []),
        (["boom", "boom", None, None], "boom (also rank 1)", []),
        (["boom", "bang", "boom", "bang"], "boom (also rank 2)", ["bang (also rank 3)"]),
        (["boom", "bang", "clash", None], "boom", ["bang", "clash"]),
    ],
    ids=["all", "neighbours", "two", "two of each", "different"],
)
def test_what_several_ranks_say_is_told_once_with_the_ranks(
    tmp_path: Path, messages: list[str | None], told: str, later: list[str]
) -> None:
    errors = [Error(rank, NOW - 9 + rank, message=text) for rank, text in enumerate(messages) if text is not None]
    verdict = judge(Case([ended(1), ended(1)], errors, last=20).make(tmp_path / "run"), NOW)
    assert verdict.reason == f"rank 0 (stage 0, dp 0, tp 0, node local-0) failed with RuntimeError: {told}"
    later_lines = [line for line in verdict.evidence if line.startswith("later: rank ")]
    assert [line.partition("RuntimeError: ")[2] for line in later_lines] == later


def test_the_first_of_several_ranks_that_say_the_same_is_named(tmp_path: Path) -> None:
    errors = [Error(0, NOW - 7), Error(1, NOW - 6), Error(3, NOW - 8)]
    verdict = judge(Case([ended(1), ended(1)], errors, last=20).make(tmp_path / "run"), NOW)
    assert verdict.reason.startswith("rank 3 (stage 1, dp 1, tp 0, node local-1) failed")
    assert verdict.reason.endswith("boom (also ranks 0-1)")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [((), "all iterations skipped"), ((*A10, "executor.rehearse=virtual"), "no loss (rehearsal)")],
    ids=["skipped", "rehearsed"],
)
def test_without_a_loss_the_evidence_says_why(tmp_path: Path, overrides: tuple[str, ...], told: str) -> None:
    run = Case(last=20, loss=None).make(tmp_path / "run")
    if overrides:
        run.write_json(run.plan, make_plan(compose([*overrides, "train.iterations=50"]), "xl/run").as_json())
    seen = observe(run, NOW)
    assert any(f"iteration: 20 of 50, {told}, 200.0 ms" in line for line in decide(seen).evidence)
    assert run_row("xl/run", seen)[2:4] == ["20/50", "-"]


def test_a_table_of_runs_says_how_far_a_batch_that_adapts_is_in_samples(tmp_path: Path) -> None:
    run = Case(last=20, length={"samples": 640}, adapt=NOISE).make(tmp_path / "run")
    assert run_row("xl/run", observe(run, NOW))[2] == "20 (50% of samples)"
    over = Case([OK, OK], last=20, length={"samples": 320}, adapt=NOISE, goal=TRAINED).make(tmp_path / "over")
    assert run_row("xl/run", observe(over, NOW))[2] == "20/20"


def test_the_first_line_does_not_count_for_the_pace(tmp_path: Path) -> None:
    seen = observe(Case(last=20).make(tmp_path / "run"), NOW)
    warm_up = replace(seen.times[0], elapsed_ms=9_999.0)
    many, alone = (time_of(replace(seen, times=times)) for times in ((warm_up, *seen.times[1:]), (warm_up,)))
    assert many is not None
    assert alone is not None
    assert (many.ms, alone.ms) == (200.0, 9_999.0)


def test_a_table_of_runs_says_how_far_its_times_of_an_iteration_vary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the pages do, within the columns of a terminal."""
    seen = observe(Case(last=20).make(tmp_path / "run"), NOW)
    each = [100.0, 100.0, 130.0, 90.0, 1234.5]
    times = [replace(seen.times[0], iteration=n, elapsed_ms=ms) for n, ms in enumerate((9_999.0, *each), 1)]
    varied = replace(seen, times=tuple(times))
    low, high = np.quantile(each, [0.1587, 0.8413], method="weibull")
    row = run_row("xl/20261126-204758Z-4757e420", varied)
    assert row[4] == f"100.0 ± {(high - low) / 2:.1f} (n = 5)"
    alone = run_row("xl/run", replace(seen, times=tuple(times[:1])))
    assert alone[4] == "9,999.0 (n = 1)"
    monkeypatch.setenv("COLUMNS", "120")
    screen = io.StringIO()
    columns = [*COLUMNS, *MORE_COLUMNS]
    Console(file=screen, width=120).print(runs_screen(columns, [[*row, *more_cells(varied)]]))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    assert row[4] in "\n".join(lines)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = Case(last=20).make(tmp_path / "run")
    with run.metrics.open("a") as file:
        file.write('{"iteration": 25, "un')
    assert [line.iteration for line in observe(run, NOW).log] == [5, 10, 15, 20]


def test_damaged_lines_of_the_log_are_reported_by_number_and_the_others_count(tmp_path: Path) -> None:
    run = Case([OK, OK], last=50).make(tmp_path / "run")
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([*lines[:3], "{}", *lines[3:], "0", '{"iteration": "1"}']) + "\n")
    found = findings(run, observe(run, NOW))
    assert (found.verdict.state, found.seen.log[-1].iteration) == (State.succeeded, 50)
    (fault,) = found.faults
    assert fault.endswith(
        "metrics.jsonl has lines that are not iterations: line 4 is damaged, or of another version of tdpp: it "
        "lacks iteration, unix, elapsed_ms, loss, nan; line 12 is damaged: it is not a JSON object; line 13 is "
        "damaged, or of another version of tdpp: it lacks unix, elapsed_ms, loss, nan"
    )
    assert f"fault: {fault}" in as_text(found)


def test_a_damaged_error_of_a_rank_is_reported_and_the_others_count(tmp_path: Path) -> None:
    run = Case([ended(1), ended(1)], errors=[Error(0, NOW - 9), Error(1, NOW - 8)]).make(tmp_path / "run")
    run.rank_error(0).write_text('{"rank": 0')
    found = findings(run, observe(run, NOW))
    assert found.verdict.reason == "rank 1 (stage 0, dp 1, tp 0, node local-0) failed with RuntimeError: boom"
    (fault,) = found.faults
    assert "rank-00000.json is not JSON" in fault


def test_that_a_run_was_asked_to_stop_is_known_whatever_the_request_holds(tmp_path: Path) -> None:
    run = Case([ended(1, "SIGTERM"), ended(1, "SIGTERM")]).make(tmp_path / "run")
    run.stop_request.write_text("{}")
    assert judge(run, NOW).state is State.stopped


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    run = Case(last=5000).make(tmp_path / "run")
    log = observe(run, NOW).log
    assert log[-1].iteration == 5000
    assert 100 < len(log) < 1000


def test_every_state_has_an_exit_code_and_the_documentation_tells_it() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    for state in State:
        rows = [row.split("|") for row in page.splitlines() if row.startswith("|")]
        assert [int(row[1]) for row in rows if state in row[2].strip().split(", ")] == [EXIT_CODES[state]]


def test_the_last_evaluation_is_shown_with_what_is_wanted(tmp_path: Path) -> None:
    train = (*EVALUATING, "train.until=loss<=3.5")
    run = Case(last=25, train=train, evaluated={10: 2.0, 20: 2.0}).make(tmp_path / "run")
    assert "evaluation: loss 3.25, after iteration 20; train.until=loss<=3.5" in as_text(
        findings(run, observe(run, NOW))
    )


@pytest.mark.parametrize(
    ("case", "shown", "left_s"),
    [
        (Case(last=20, length={"epochs": 3, "samples": 810}), "20 of 50, epoch 1.19 of 3, loss", 5.0),
        (Case(last=20, length={"samples": 810}), "20 of 50, 320 of 810 samples, loss", 5.0),
        (
            Case(last=20, length={"samples": 810}, adapt=NOISE),
            f"20 of at most 50, 320 of 810 samples, loss 4.0000, {SPEED} 1 s ago",
            490 / 80 - 1,
        ),
        (
            Case(last=20, length={"samples": 810}, adapt=NOISE, train=EVALUATING, evaluated={20: 2.0}),
            "20 of at most 50, 320 of 810",
            490 / 80 + 4 * 2.0 - 1,
        ),
        (
            Case([OK, OK], last=20, length={"samples": 320}, adapt=NOISE, goal=TRAINED),
            "20 of 20, 320 of 320 samples, loss",
            None,
        ),
        (Case(length={"samples": 810}, adapt=NOISE), "none of at most 50 logged yet", None),
        (Case(last=25, train=EVALUATING, evaluated={10: 2.0, 20: 4.0}), "end: about 13 s left, ends ", 4.0 + 3 * 3.0),
        (
            Case(last=20, train=(*EVALUATING, "train.until=loss<=1"), evaluated={20: 4.0}),
            "end: at most 17 s left, ends ",
            17.0,
        ),
        (Case(last=20, train=("train.eval_interval=20",), evaluated={20: 4.0}), "end: about 13 s left, ends ", 13.0),
        (Case(), "none of 50 logged yet", None),
        (Case([OK, OK], last=50, length={"samples": 810}), "50 of 50, 800 of 810 samples, loss", None),
    ],
    ids=[
        *("epochs", "samples", "adaptive", "adaptive and evaluated", "adaptive and over", "adaptive and nothing yet"),
        *("evaluations", "until", "the last one", "nothing yet", "over"),
    ],
)
def test_the_status_says_how_far_it_is_in_the_runs_own_terms(
    tmp_path: Path, case: Case, shown: str, left_s: float | None
) -> None:
    run = case.make(tmp_path / "run")
    found = findings(run, observe(run, NOW))
    text = as_text(found)
    assert shown in text
    assert (" left" in text) == (left_s is not None)
    content = as_json(found)
    assert content["left_s"] == (None if left_s is None else pytest.approx(left_s))
    assert (content["samples"], content["epochs"]) == (case.length.get("samples"), case.length.get("epochs"))
    assert content["consumed_samples"] == 16 * case.last
