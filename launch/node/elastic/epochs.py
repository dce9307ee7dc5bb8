"""The ends of epochs of an elastic run, and which nodes it goes on with: those predicted to take least."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from conf.run_folder.rundir import RunDir
from launch.node.elastic.regroup import Company, saved
from launch.tracking.series import MetricsFile
from megatron_ext.contract.adaptive.config import NONE
from megatron_ext.contract.adaptive.forecast import Candidate, choose, forecast
from megatron_ext.contract.adaptive.shares import fastest
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Choosing, Elastic

LOOK_S = 1.0
"""Between two looks at the log."""


class EpochEnds:
    """The ends of epochs of one start, as the first node of its plan sees them."""

    def __init__(self, run: RunDir, plan: Plan, company: Company, began_unix: float) -> None:
        self._run = run
        self._plan = plan
        self._company = company
        self._began_unix = began_unix
        self._metrics = MetricsFile(run.metrics)
        self._lines: list[dict[str, Any]] = []
        """The lines of the log, as far as it was read."""
        self._epoch: int | None = None
        self._looked = 0.0

    def look(self) -> None:
        """Asks for other nodes where an epoch has ended, and the next one takes less on those."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._read()
        if not self._lines or self._lines[-1]["unix"] <= self._began_unix:  # this start has logged nothing yet
            return
        last = epoch_of(self._plan, self._lines[-1]["consumed_samples"])
        if self._epoch is None:
            self._epoch = epoch_of(self._plan, self._consumed_before())
        if last <= self._epoch:
            return
        self._epoch = last
        plan, logged = self._company.measured_plan(), [self._logged(line) for line in self._lines]
        with suppress(ValueError):  # no nodes can take the batches that are forecast: these go on as long as they can
            found = chosen(plan, self._company.available, logged)
            if found is not None:
                self._company.ask_for(*found)

    def _read(self) -> None:
        lines, cut = self._metrics.new_lines()
        if cut:
            self._lines.clear()
        self._lines += lines

    def _consumed_before(self) -> float:
        """Samples, where this start began."""
        iteration = saved(self._run)
        return next((line["consumed_samples"] for line in self._lines if line["iteration"] == iteration), 0.0)

    def _logged(self, line: dict[str, Any]) -> Logged:
        batch = line.get("global_batch_size", self._plan.global_batch_size)
        return Logged(line["consumed_samples"], batch, line["elapsed_ms"] / 1e3)


RECENT = 20
"""Logged iterations, of which the newest ones with the present batch say how long one takes."""


@dataclass(frozen=True)
class Logged:
    """A line of metrics.jsonl."""

    consumed: float
    """Samples, with those of its iterations."""
    batch: float
    """Samples of the global batch."""
    seconds: float
    """The seconds of an iteration."""


def _of(plan: Plan) -> tuple[Elastic, Choosing]:
    assert plan.elastic is not None
    assert plan.elastic.choosing is not None
    return plan.elastic, plan.elastic.choosing


def epoch_of(plan: Plan, consumed: float) -> int:
    """The number of the epoch that the next sample is of, from 0."""
    _, how = _of(plan)
    return math.floor(consumed / how.epoch)


def chosen(plan: Plan, available: Collection[int], logged: Sequence[Logged]) -> tuple[list[int], str] | None:
    """The nodes to go on with, and why; None where those of the plan are to stay.

    The times that the plan has, which are predicted or measured, are multiplied by what the newest iterations took
    against them.

    Args:
        available: node ranks of those that take part or wait.
        logged: lines of the log, one at least.
    """
    (_, how), last = _of(plan), logged[-1]
    total = plan.train.samples or plan.train.iterations * plan.global_batch_size
    span = min(how.epoch, total - last.consumed)
    sets = _node_sets(plan, available)
    if span <= 0.0 or len(sets) < 2:
        return None
    recent = [line.seconds for line in logged[-RECENT:] if line.batch == last.batch]
    factor = median(recent) / _seconds(plan, plan.used)(last.batch)
    adapt = plan.adapt
    bounds = (last.batch, last.batch) if adapt is None or adapt.rule == NONE else (adapt.lower, adapt.upper)
    candidates = [_candidate(plan, nodes, factor) for nodes in sets]
    ahead = forecast(_batches(logged), span, *bounds)
    choice = choose(candidates, sets.index(plan.used), ahead, how.restart_s, how.by)
    nodes = sets[choice.number]
    return None if nodes == plan.used else (nodes, f"epoch {epoch_of(plan, last.consumed)} ended: {choice.reason}")


def _batches(logged: Sequence[Logged]) -> list[tuple[float, float]]:
    """Consumed samples and the batch from there on."""
    found: list[tuple[float, float]] = []
    for line in logged:
        if not found or found[-1][1] != line.batch:
            found.append((max(0.0, line.consumed - line.batch), line.batch))
    return [*found, (logged[-1].consumed, logged[-1].batch)]


def _node_sets(plan: Plan, available: Collection[int]) -> list[list[int]]:
    """The nodes of the plan, and others in their place: of each group those first that take part already."""
    elastic, how = _of(plan)
    of_group: dict[str, list[int]] = {}
    for node in sorted(available, key=lambda node: (node not in plan.used, node)):
        of_group.setdefault(plan.nodes[node].group, []).append(node)
    found = [plan.used]
    for one in how.candidates:
        if any(count > len(of_group.get(group, ())) for group, count in one.counts.items()):
            continue
        nodes = sorted(node for group, count in one.counts.items() for node in of_group.get(group, ())[:count])
        if nodes not in found and len(nodes) >= elastic.min_nodes:
            found.append(nodes)
    return found


def _candidate(plan: Plan, nodes: Sequence[int], factor: float) -> Candidate:
    elastic, _ = _of(plan)
    seconds = _seconds(plan, nodes)
    price = None if elastic.prices is None else sum(elastic.prices[node] for node in nodes)
    return Candidate(lambda batch: factor * seconds(batch), price)


def _seconds(plan: Plan, nodes: Sequence[int]) -> Callable[[float], float]:
    """Returns the seconds of an iteration on some nodes with a global batch of so many samples, by the plan's times."""
    elastic, how = _of(plan)
    replicas = [node for node in nodes for _ in range(elastic.ranks[node] // plan.tensor)]
    weights = [1.0 / elastic.weights[replica] for replica in elastic.replicas_on(nodes, plan.tensor)]
    rest, micro_batch_s = _rest(plan, nodes), how.micro_batch_s

    def of_batch(batch: float) -> float:
        count = round(batch / plan.micro_batch_size)
        if count < len(replicas):
            return math.inf
        shares = fastest(weights, count)
        return rest + max(share * micro_batch_s[node] for share, node in zip(shares, replicas, strict=True))

    return of_batch


def _rest(plan: Plan, nodes: Sequence[int]) -> float:
    """Returns the numbers of nodes that are most like these: a run may have lost some."""
    _, how = _of(plan)
    groups = [plan.nodes[node].group for node in nodes]

    def off(counts: Mapping[str, int]) -> int:
        return sum(abs(count - groups.count(group)) for group, count in counts.items())

    return min(how.candidates, key=lambda one: off(one.counts)).rest_s
