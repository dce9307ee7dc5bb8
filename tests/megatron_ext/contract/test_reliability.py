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


def test_no_other_interval_is_better() -> None:
    for save_s, mtbf_s in ((5, 3600), (60, 3600), (300, 86400)):
        best = best_interval_s(save_s, mtbf_s)
        least = min(expected_s(best * part / 50, save_s, 100, mtbf_s) / (best * part / 50) for part in range(5, 500))
        assert expected_s(best, save_s, 100, mtbf_s) / best < 1.002 * least
