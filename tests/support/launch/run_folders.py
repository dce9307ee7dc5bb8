"""Run folders made for a test: of two nodes with two ranks each, as agents and ranks would have left them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from megatron_ext.contract.adaptive.config import AdaptConfig
from tests.support.launch.live import TWO_NODES

NOW = 1_000_000.0


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


EVALUATING = ("train.eval_interval=10",)
NOISE = AdaptConfig("noise", 0.3, 8, 640, 100, 0.1, 4, "sqrt", rebalance=False)
