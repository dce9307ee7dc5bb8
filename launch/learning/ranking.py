"""What came of a rehearsal of learning: how good each plan became, and how long it takes to become so good.

Each seed is a training of its own, which has the same initial weights and the same samples under every plan. A mean
comes with the half-width of its 95 % interval (Student's t), and two plans are compared seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, stdev
from typing import Any

from megatron_ext.contract.goal import LARGER, Best, Target

T_95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided quantiles of Student's t, by degrees of freedom."""
MOST_SEEDS = len(T_95)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A plan's quality with one seed."""

    samples: Sequence[int]
    """Consumed up to each evaluation."""
    values: Sequence[float]
    """The values of the metric there."""
    seconds: Sequence[float] = ()
    """Predicted up to each evaluation, where the batch adapts; empty: every iteration takes as long."""
    batches: Sequence[tuple[int, bool]] = ()
    """The micro-batches of each iteration, and whether it measured the noise of its gradient."""
    iterations: Sequence[int] = ()
    """Up to each evaluation."""
    failed: str | None = None
    """Why it ended before its time: the loss was no number any more."""

    def timed(self, seconds: Callable[[int, bool], float]) -> Curve:
        """Returns the curve with `seconds` of an iteration, by what `batches` say of it."""
        ends = [0.0, *accumulate(seconds(*batch) for batch in self.batches)]
        return replace(self, seconds=[ends[iteration] for iteration in self.iterations])


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A plan, and what was found of it."""

    name: str
    layout: str
    curves: Sequence[Curve]
    """The curve of each seed."""
    iteration_s: float | None
    """Predicted of the plan on its cluster, with its first batch; None where nobody knows."""
    samples: int
    """The samples of an iteration with that batch, in what was trained."""

    def seconds(self, samples: float, curve: Curve) -> float | None:
        """The predicted time of as many iterations as it took to train on so many samples."""
        if self.iteration_s is None:
            return None
        if not curve.seconds:
            return samples / self.samples * self.iteration_s
        return _between(samples, [0, *curve.samples], [0.0, *curve.seconds])


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A quality, and what it is measured by."""

    target: Target
    chosen: bool
    """Whether a user has given it; else it is what every plan reached."""

    def __str__(self) -> str:
        sign = ">=" if self.target.larger else "<="
        return f"{self.target.metric}{sign}{self.target.value:.4g}"


@dataclass(frozen=True)
class Mean:
    """The mean over seeds."""

    value: float
    half: float
    """Half of its 95 % interval; infinite for one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        if len(values) == 1:
            return cls(values[0], math.inf)
        return cls(fmean(values), T_95[len(values) - 1] * stdev(values) / math.sqrt(len(values)))

    @property
    def is_noise(self) -> bool:
        """Whether it may as well be 0; nobody knows of one seed, which is not called noise."""
        return abs(self.value) <= self.half < math.inf


def mean_curve(plan: Trained) -> dict[str, Any]:
    """What a page draws of a plan: evaluation by evaluation, as far as all seeds came, their mean and their ends."""
    columns = [*zip(*(curve.values for curve in plan.curves))]  # noqa: B905  (as far as all came)
    places = [*zip(*(curve.samples for curve in plan.curves))][: len(columns)]  # noqa: B905
    samples = [round(fmean(of_seeds)) for of_seeds in places]
    times = [[plan.seconds(one, curve) for one, curve in zip(of, plan.curves, strict=True)] for of in places]
    seconds = [fmean(one for one in of_seeds if one is not None) for of_seeds in times if None not in of_seeds]
    return {
        "name": plan.name,
        "samples": samples,
        "seconds": None if plan.iteration_s is None else seconds,
        "means": [fmean(values) for values in columns],
        "lows": [min(values) for values in columns],
        "highs": [max(values) for values in columns],
    }


def metric_of(until: str | None, best: str | None) -> tuple[str, bool]:
    """Returns what compares plans, and whether more is better: `train.until`, else `train.best`, else the loss."""
    if until is not None:
        return Target.parse(until).metric, Target.parse(until).larger
    if best is not None:
        return Best.parse(best).metric, Best.parse(best).larger
    return "loss", LARGER["loss"]


def goal_of(plans: Sequence[Trained], until: str | None, best: str | None) -> Goal | None:
    """`train.until`, or what all plans have reached with all seeds; None if one has not been evaluated."""
    if until is not None:
        return Goal(target=Target.parse(until), chosen=True)
    metric, larger = metric_of(until, best)
    curves = [curve for plan in plans for curve in plan.curves if curve.failed is None]
    best_of = max if larger else min
    reached = [best_of(curve.values) for curve in curves]
    if not reached or any(map(math.isnan, reached)):
        return None
    return Goal(target=Target(metric, larger, min(reached) if larger else max(reached)), chosen=False)


def reached_at(curve: Curve, goal: Goal) -> float | None:
    """Samples after which the goal is reached, on a straight line between two evaluations; None: it is not, or the
    training diverges."""
    if curve.failed is not None:
        return None
    target = goal.target
    before: tuple[int, float] | None = None
    for samples, value in zip(curve.samples, curve.values, strict=True):
        if target.reached({target.metric: value}):
            if before is None or value == before[1] or not math.isfinite(before[1]):
                return float(samples)
            share = (target.value - before[1]) / (value - before[1])
            return before[0] + share * (samples - before[0])
        before = samples, value
    return None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan in its place among the others."""

    plan: Trained
    quality: Mean | None
    """At the end, of seeds that came to it."""
    to_goal: Mean | None
    """Samples; None unless all seeds reach the goal."""
    reached: int
    """Seeds that reach it."""
    time_to_goal: Mean | None
    """Seconds, predicted."""


def ranked(plans: Sequence[Trained], goal: Goal | None) -> list[Row]:
    """The fastest to the goal first: by predicted time where that is known of all, else by samples. Then those that do
    not always reach it, the best first."""
    rows = [_row(plan, goal) for plan in plans]
    timed = all(plan.iteration_s is not None for plan in plans)
    larger = goal is not None and goal.target.larger

    def key(row: Row) -> tuple[int, float, float]:
        by = row.time_to_goal if timed else row.to_goal
        quality = math.inf if row.quality is None else row.quality.value * (-1 if larger else 1)
        return -row.reached, math.inf if by is None else by.value, quality

    return sorted(rows, key=key)


def _row(plan: Trained, goal: Goal | None) -> Row:
    ended = [curve.values[-1] for curve in plan.curves if curve.failed is None]
    places = [] if goal is None else [reached_at(curve, goal) for curve in plan.curves]
    found = [place for place in places if place is not None]
    all_reach = bool(found) and len(found) == len(plan.curves)
    times = [plan.seconds(place, curve) for place, curve in zip(found, plan.curves, strict=False)]
    known = [one for one in times if one is not None]
    return Row(
        plan=plan,
        quality=Mean.of(ended) if len(ended) == len(plan.curves) else None,
        to_goal=Mean.of(found) if all_reach else None,
        reached=len(found),
        time_to_goal=Mean.of(known) if all_reach and len(known) == len(times) else None,
    )


def _between(place: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Interpolates linearly between values at rising places; beyond the last one it returns that one's."""
    for (left, low), (right, high) in pairwise(zip(places, values, strict=True)):
        if place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return values[-1]


def quality_apart(one: Trained, other: Trained) -> Mean | None:
    """Returns by how much `one` ends above `other`, seed by seed; None if one of them did not come to its end."""
    if any(curve.failed for plan in (one, other) for curve in plan.curves):
        return None
    pairs = zip(one.curves, other.curves, strict=True)
    found = Mean.of([mine.values[-1] - theirs.values[-1] for mine, theirs in pairs])
    # Of a metric that counts few samples all seeds may differ by one of them, which says nothing of the spread.
    return found if found.half > 1e-6 * abs(found.value) else Mean(found.value, abs(found.value))


def time_apart(one: Trained, other: Trained, goal: Goal) -> Mean | None:
    """Returns the part by which `one` takes longer to the goal than `other`, seed by seed: 0.5 is half as long again.

    Predicted time, or samples where that of one is not known; None if one does not always reach the goal.
    """
    timed = one.iteration_s is not None and other.iteration_s is not None
    found = []
    for mine, theirs in zip(one.curves, other.curves, strict=True):
        places = reached_at(mine, goal), reached_at(theirs, goal)
        if places[0] is None or places[1] is None:
            return None
        ours, others = (one.seconds(places[0], mine), other.seconds(places[1], theirs)) if timed else places
        if not others:
            return None
        found.append((ours or 0.0) / others - 1.0)
    return Mean.of(found)
