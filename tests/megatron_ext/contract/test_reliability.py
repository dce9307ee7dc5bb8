"""What failures take on average is what a thousand runs that fail at random take."""

from __future__ import annotations

import math
import random

import pytest

from megatron_ext.contract.reliability import best_interval_s, expected_s


def played(work_s: float, save_s: float, restart_s: float, mtbf_s: float, draw: random.Random) -> float:
    """Seconds until the work and its save are done, starting over after each failure."""
    taken, left = 0.0, work_s + save_s
    while (until := draw.expovariate(1 / mtbf_s)) < left:
        taken += until
        left = restart_s + work_s + save_s
    return taken + left


@pytest.mark.parametrize(
    ("work_s", "save_s", "restart_s", "mtbf_s"),
    [(600, 20, 120, 7200), (3600, 60, 300, 3600), (30, 30, 200, 400), (86400, 60, 0, 1e6)],
)
def test_the_expectation_is_what_many_runs_take(work_s: float, save_s: float, restart_s: float, mtbf_s: float) -> None:
    draw = random.Random(7)
    mean = sum(played(work_s, save_s, restart_s, mtbf_s, draw) for _ in range(20_000)) / 20_000
    assert expected_s(work_s, save_s, restart_s, mtbf_s) == pytest.approx(mean, rel=0.03)


def test_without_failures_only_saves_take_time_and_with_too_many_no_work_is_ever_done() -> None:
    assert expected_s(600, 20, 120, math.inf) == 620
    assert expected_s(1e6, 20, 120, 60) == math.inf


@pytest.mark.parametrize(
    ("save_s", "mtbf_s"), [(0.01, 3600), (1.0, 3600), (5.0, 3600), (60.0, 3600), (900.0, 3600), (300.0, 86400)]
)
def test_the_interval_is_the_one_with_the_least_expected_time(save_s: float, mtbf_s: float) -> None:
    """Daly's whole expectation of a run with exponential failures, searched by brute force."""

    def expected(interval: float) -> float:
        return (math.exp((interval + save_s) / mtbf_s) - 1) / interval

    best = min(expected(save_s * 0.1 * 1.01**step) for step in range(2000) if save_s * 0.1 * 1.01**step < 20 * mtbf_s)
    assert expected(best_interval_s(save_s, mtbf_s)) < 1.002 * best


def test_a_run_whose_saves_take_longer_than_its_nodes_live_still_saves() -> None:
    assert best_interval_s(1e6, 60.0) == 60.0
