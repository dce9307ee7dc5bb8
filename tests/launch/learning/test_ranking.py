"""Plans are ranked by how long they take to a quality, and what may be noise is called so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from launch.learning.ranking import (
    MOST_SEEDS,
    T_95,
    Curve,
    Mean,
    Trained,
    goal_of,
    metric_of,
    quality_apart,
    ranked,
    reached_at,
)
from launch.learning.table import csv_text, sentences, table

SAMPLES = (100, 200, 300)


def plan(name: str, values: Sequence[Sequence[float]], iteration_s: float | None = 1.0) -> Trained:
    curves = [Curve(samples=SAMPLES[: len(of)], values=of) for of in values]
    return Trained(name=name, layout=name, curves=curves, iteration_s=iteration_s, samples=10)


GOOD = plan("good", [(0.5, 0.8, 0.9), (0.6, 0.9, 0.95)])
SLOW = plan("slow", [(0.6, 0.9, 0.95), (0.7, 0.9, 0.96)], iteration_s=2.0)
NEVER = plan("never", [(0.1, 0.2, 0.3), (0.5, 0.8, 0.9)], iteration_s=0.1)


def test_the_quantiles_are_those_of_students_t() -> None:
    from scipy import stats

    assert T_95[1:] == pytest.approx([stats.t.ppf(0.975, seeds - 1) for seeds in range(2, MOST_SEEDS + 1)], abs=5e-4)


def test_an_interval_is_that_of_scipy() -> None:
    from scipy import stats

    values = [0.3, 0.5, 0.45, 0.7]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    found = Mean.of(values)
    assert (found.value - found.half, found.value + found.half) == pytest.approx((low, high), rel=1e-3)
    assert math.isinf(Mean.of([1.0]).half)


@pytest.mark.parametrize(
    ("until", "values", "expected"),
    [
        ("top-1>=0.7", (0.5, 0.9, 0.9), 150.0),
        ("top-1>=0.5", (0.5, 0.9, 0.9), 100.0),
        ("top-1>=0.95", (0.5, 0.9, 0.9), None),
        ("loss<=1", (3.0, 2.0, 0.0), 250.0),
        ("loss<=1", (math.nan, 0.5, 0.0), 200.0),
        ("loss<=1", (0.5, 2.0, 0.0), 100.0),
    ],
)
def test_a_goal_is_reached_between_two_evaluations(until: str, values: Sequence[float], expected: float | None) -> None:
    goal = goal_of([], until, None)
    assert goal is not None
    found = reached_at(Curve(samples=SAMPLES, values=values), goal)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_fastest_in_time_comes_first_and_not_the_one_with_fewest_samples() -> None:
    goal = goal_of([], "top-1>=0.9", None)
    rows = ranked([NEVER, SLOW, GOOD], goal)
    assert [row.plan.name for row in rows] == ["good", "slow", "never"]
    good, slow, never = rows
    assert good.to_goal is not None
    assert slow.to_goal is not None
    assert good.to_goal.value == pytest.approx(250)
    assert slow.to_goal.value == pytest.approx(200)
    assert good.time_to_goal is not None
    assert good.time_to_goal.value == pytest.approx(25.0)
    assert (never.reached, never.to_goal) == (1, None)


def test_without_predicted_times_the_fewest_samples_come_first() -> None:
    unknown = [plan(one.name, [curve.values for curve in one.curves], None) for one in (GOOD, SLOW)]
    rows = ranked(unknown, goal_of([], "top-1>=0.9", None))
    assert [row.plan.name for row in rows] == ["slow", "good"]
    assert rows[0].time_to_goal is None


@pytest.mark.parametrize(("best", "worst"), [("top-1", 0.3), ("max:mine", 0.3), ("min:mine", 0.95), (None, 0.95)])
def test_without_a_goal_it_is_what_all_have_reached(best: str | None, worst: float) -> None:
    """Of each training its best evaluation, which need not be the last."""
    rising = [GOOD, SLOW, NEVER]
    falling = [plan(one.name, [curve.values[::-1] for curve in one.curves]) for one in rising]
    low = plan("low", [(0.95, 0.97, 0.96)])
    larger = metric_of(None, best)[1]
    goal = goal_of([*rising] if larger else [*falling, low], None, best)
    assert goal is not None
    assert goal.target.value == pytest.approx(worst)
    assert (goal.target.larger, goal.chosen) == (larger, False)


def test_seeds_are_compared_pair_by_pair() -> None:
    """Which differ far more from each other than the plans do."""
    one = plan("one", [(0, 0, 0.5), (0, 0, 0.7), (0, 0, 0.9)])
    same = plan("same", [(0, 0, 0.52), (0, 0, 0.69), (0, 0, 0.9)])
    better = plan("better", [(0, 0, 0.6), (0, 0, 0.81), (0, 0, 1.0)])
    noise, real = quality_apart(same, one), quality_apart(better, one)
    assert noise is not None
    assert real is not None
    assert noise.is_noise
    assert not real.is_noise
    assert real.value == pytest.approx(0.31 / 3)


def test_a_plan_that_diverges_is_the_last_one_and_says_why() -> None:
    failed = Trained(
        name="failed",
        layout="failed",
        curves=[GOOD.curves[0], Curve(samples=(100, 200), values=(0.99, 0.99), failed="iteration 13: the loss is nan")],
        iteration_s=0.01,
        samples=10,
    )
    goal = goal_of([failed, GOOD], "top-1>=0.9", None)
    rows = ranked([failed, GOOD], goal)
    _, cells = table(rows, "top-1", goal)
    assert [row[0] for row in cells] == ["good", "failed"]
    assert cells[1][1:] == ["diverged (1 of 2)", "not reached (1 of 2)", "10.0", "-"]
    assert "failed: iteration 13: the loss is nan" in [*sentences(rows, "top-1", goal)]


def test_the_csv_has_a_line_for_each_plan_and_seed() -> None:
    goal = goal_of([], "top-1>=0.9", None)
    lines = csv_text(ranked([GOOD, NEVER], goal), "top-1", goal).splitlines()
    assert lines[0] == "rank,plan,layout,seed,top-1,goal,samples_to_goal,iteration_s,time_to_goal_s"
    assert lines[1] == "1,good,good,0,0.9,top-1>=0.9,300.0,1.0,30.0"
    assert lines[3] == "2,never,never,0,0.3,top-1>=0.9,,0.1,"
    assert len(lines) == 5


def test_the_first_plan_is_named_with_those_that_may_as_well_be_first() -> None:
    goal = goal_of([], "top-1>=0.8", None)
    late = plan("late", [(0.4, 0.79, 0.9), (0.6, 0.81, 0.95)])
    said = [*sentences(ranked([GOOD, late], goal), "top-1", goal)]
    assert said[0] == "good comes first, but the difference to late is within noise"
    assert said[1].startswith("late compared with good: the same top-1; ")
    slower = plan("slower", [curve.values for curve in GOOD.curves], 3.0)
    said = [*sentences(ranked([slower, GOOD], goal), "top-1", goal)]
    assert said == [
        "good comes first",
        "slower compared with good: the same top-1; 200 % ± 0 % more time to the goal (more than noise)",
    ]


def test_seeds_that_all_differ_by_one_sample_say_nothing_of_the_spread() -> None:
    found = quality_apart(plan("a", [(0, 0, 0.3), (0, 0, 0.7)]), plan("b", [(0, 0, 0.2), (0, 0, 0.6)]))
    assert found is not None
    assert found.is_noise
