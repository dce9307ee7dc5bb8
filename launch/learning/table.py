"""The plans of a rehearsal of learning as a table, as CSV, and in sentences."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence

from conf.schema.experiment import Experiment
from launch.learning.ranking import Goal, Mean, Row, quality_apart, reached_at, time_apart
from megatron_ext.contract.adaptive.shares import fastest
from megatron_ext.contract.schedule.iteration import SampleDivision, several

UNKNOWN = "-"


def table(rows: Sequence[Row], metric: str, goal: Goal | None) -> tuple[list[str], list[list[str]]]:
    """The heading and a row for each plan."""
    aim = "the goal" if goal is None else str(goal)
    head = ["plan", "layout", metric, f"samples to {aim}", "predicted ms/iteration", f"time to {aim}"]
    if all(row.plan.name == row.plan.layout for row in rows):
        head.pop(1)
    found = []
    for row in rows:
        seeds = len(row.plan.curves)
        fails = sum(curve.failed is not None for curve in row.plan.curves)
        cells = [
            row.plan.name,
            row.plan.layout,
            f"diverged ({fails} of {seeds})" if row.quality is None else with_half(row.quality, ".4f"),
            with_half(row.to_goal, ",.0f") if row.to_goal else f"not reached ({row.reached} of {seeds})",
            UNKNOWN if row.plan.iteration_s is None else f"{row.plan.iteration_s * 1e3:,.1f}",
            UNKNOWN if row.time_to_goal is None else duration(row.time_to_goal),
        ]
        found.append(cells if "layout" in head else [cells[0], *cells[2:]])
    return head, found


def with_half(mean: Mean, form: str) -> str:
    """Writes a mean with its interval, if there is one."""
    value = format(mean.value, form)
    return value if math.isinf(mean.half) else f"{value} ± {format(mean.half, form)}"


def duration(seconds: Mean) -> str:
    """Writes a length of time in the unit that fits, with its interval."""
    unit, size = next((one for one in (("h", 3600.0), ("min", 60.0)) if seconds.value >= 2 * one[1]), ("s", 1.0))
    return f"{with_half(Mean(seconds.value / size, seconds.half / size), '.3g')} {unit}"


def sentences(rows: Sequence[Row], metric: str, goal: Goal | None) -> Iterator[str]:
    """Which plan comes first, how far the others are from it, and whether that is more than noise."""
    first = rows[0].plan
    apart = [(row.plan, None if goal is None else time_apart(row.plan, first, goal)) for row in rows[1:]]
    if len(rows) > 1:
        others = [plan.name for plan, later in apart if later is not None and later.is_noise]
        yield f"{first.name} comes first" + (
            f", but the difference to {' and '.join(others)} is within noise" if others else ""
        )
    if goal is not None and not goal.chosen:
        yield "the goal is the quality that every plan reached with every seed; train.until=… sets another"
    if len(first.curves) == 1:
        yield "with one seed the noise is unknown; seeds=3 trains with three"
    for plan, later in apart:
        parts = []
        better = quality_apart(plan, first)
        if better is not None and not better.value and not better.half:
            parts.append(f"the same {metric}")
        elif better is not None:
            side = "higher" if better.value > 0 else "lower"
            parts.append(f"{metric} {_apart(better, '.4f', '')} {side}{_doubt(better)}")
        if later is not None:
            what = "time" if plan.iteration_s is not None and first.iteration_s is not None else "samples"
            percent = Mean(100 * later.value, 100 * later.half)
            side = "more" if later.value > 0 else "less"
            parts.append(f"{_apart(percent, '.0f', ' %')} {side} {what} to the goal{_doubt(later)}")
        if parts:
            yield f"{plan.name} compared with {first.name}: {'; '.join(parts)}"
    for row in rows:
        for why in dict.fromkeys(curve.failed for curve in row.plan.curves if curve.failed):
            yield f"{row.plan.name}: {why}"


def _apart(mean: Mean, form: str, unit: str) -> str:
    value = f"{format(abs(mean.value), form)}{unit}"
    return value if math.isinf(mean.half) else f"{value} ± {format(mean.half, form)}{unit}"


def _doubt(apart: Mean) -> str:
    if math.isinf(apart.half):
        return ""
    return " (within noise)" if apart.is_noise else " (more than noise)"


def csv_text(rows: Sequence[Row], metric: str, goal: Goal | None) -> str:
    """A line for each plan and seed: quality at the end, and what it takes to the goal."""
    written = io.StringIO()
    out = csv.writer(written, lineterminator="\n")
    out.writerow(["rank", "plan", "layout", "seed", metric, "goal", "samples_to_goal", "iteration_s", "time_to_goal_s"])
    for rank, row in enumerate(rows, 1):
        for seed, curve in enumerate(row.plan.curves):
            at = None if goal is None else reached_at(curve, goal)
            time = None if at is None else row.plan.seconds(at, curve)
            last = curve.values[-1] if curve.values and curve.failed is None else None
            cells = [rank, row.plan.name, row.plan.layout, seed, last, goal, at, row.plan.iteration_s, time]
            out.writerow(["" if cell is None else cell for cell in cells])
    return written.getvalue()


class BatchTimes:
    """Predicted of a plan on its cluster, with the shares of its replicas."""

    def __init__(self, experiment: Experiment) -> None:
        """Raises:
        ConfigError: a profile cannot be read.
        SearchError: the times cannot be predicted.
        """
        from fasop.trainings.placed_nodes import node_sets

        (own,), _ = node_sets(experiment, [experiment.node_order])
        self._nodes, self._size = own.nodes, experiment.parallel.micro_batch_size

    def seconds(self, micro_batches: int, measures: bool) -> float:
        """Returns the seconds of an iteration with so many micro-batches, which may measure its gradient's noise."""
        weights = self._nodes.weights
        shares = fastest([1.0 / weight for weight in weights], micro_batches)
        division = SampleDivision(shares, (self._size,) * len(shares), several(self._nodes.streams))
        return self._nodes.seconds(division, measures)
