"""How far a run has come towards what it is to reach, and what it has cost: whether it may end, or must."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Callable, Mapping, Optional

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import json_line, write_json
from megatron_ext.contract.goal import MAX_COST, UNTIL, Best, Target
from megatron_ext.contract.plan import Plan

NOTE_S = 5.0
"""Between two notes of what has been spent."""


class GoalTracker:
    """Decides the same on all ranks, from evaluations that are the same on all ranks."""

    def __init__(self, plan: Plan, last: Optional[Mapping[str, float]], best: Optional[Mapping[str, float]]) -> None:
        """`last` is what the checkpoint that the run goes on from had in its evaluation, `best` what the best one had;
        None without one."""
        train = plan.train
        self._plan = plan
        self._target = None if train.until is None else Target.parse(train.until)
        self._best = None if train.best is None else Best.parse(train.best)
        self._value = math.nan
        if self._best is not None and best is not None:
            self._value = best.get(self._best.metric, math.nan)
        self._last = last
        self.reached = self._target is not None and last is not None and self._target.reached(last)
        """Whether `train.until` holds."""

    def follow(self, metrics: Mapping[str, float]) -> bool:
        """Takes note of an evaluation; whether it is the best so far. Raises EngineError: it lacks a metric that
        `train.until` or `train.best` names."""
        for key, wanted in (("until", self._target), ("best", self._best)):
            if wanted is not None and wanted.metric not in metrics:
                raise EngineError(
                    f"train.{key}={getattr(self._plan.train, key)}: an evaluation gives {', '.join(metrics)}; use one "
                    "of these"
                )
        self._last = metrics
        self.reached = self._target is not None and self._target.reached(metrics)
        if self._best is None or not self._best.better(metrics[self._best.metric], self._value):
            return False
        self._value = metrics[self._best.metric]
        return True

    def record(self, iteration: int) -> None:
        """Writes down that the run ends here, having reached what it was to reach."""
        assert self._target is not None
        assert self._last is not None
        record(self._plan, iteration, UNTIL, str(self._plan.train.until), self._last[self._target.metric])


class Spending:
    """What the nodes of a run cost while it trains, and what its iterations send between groups, over all its starts.

    It is kept in a file of its own: lines of metrics.jsonl are dropped where a start trains their iterations anew.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        """The plan has `max_cost`, and nothing was dropped from its metrics.jsonl yet."""
        assert plan.train.max_cost is not None
        assert plan.train.price_per_hour is not None
        self._plan = plan
        self._limit = plan.train.max_cost
        self._per_second = plan.train.price_per_hour / 3600
        self._per_iteration = plan.train.traffic_price or 0.0
        self._clock = clock
        self._began = clock()
        spent = plan.files.spent  # as earlier starts have noted
        noted = _dollars(spent.read_text(encoding="utf-8"), "dollars") if spent.exists() else 0.0
        self._before = max(noted, _cost_before(plan.files.metrics))
        self._next_note = self._began
        self._note()

    @property
    def dollars(self) -> float:
        return self._before + (self._clock() - self._began) * self._per_second

    @property
    def over(self) -> bool:
        """Whether the run is to end."""
        return self.dollars >= self._limit

    def iterated(self) -> None:
        """Adds the bytes of an iteration, and writes down what has been spent now and then."""
        self._before += self._per_iteration
        self._note()

    def _note(self) -> None:
        """So no start forgets what those before it have cost."""
        now = self._clock()
        if now >= self._next_note:
            self._next_note = now + NOTE_S
            write_json(self._plan.files.spent, {"dollars": self.dollars})

    def record(self, iteration: int) -> None:
        """Writes down that the run ends here, for it has cost what it may."""
        record(self._plan, iteration, MAX_COST, f"{self._limit:g}", self.dollars)


def _cost_before(metrics: Path) -> float:
    """What the lines of earlier starts say, of which some may be damaged and the last one cut short."""
    if not metrics.exists():
        return 0.0
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return max((_dollars(line, "cost") for line in lines if line.endswith("\n")), default=0.0)


def _dollars(text: str, key: str) -> float:
    found = (json_line(text) or {}).get(key)
    return float(found) if isinstance(found, (int, float)) else 0.0


def record(plan: Plan, iteration: int, why: str, limit: str, value: float) -> None:
    """goal.json (docs/formats.md)."""
    write_json(plan.files.goal, {"iteration": iteration, "ended_by": why, "limit": limit, "value": value})
