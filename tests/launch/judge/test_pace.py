"""What is left of a run whose batch adapts, and how long its lines take, follow from its samples and its last line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conf.run_folder.iteration_time import LineTime
from launch.judge.progress import left_s, samples_per_s, usual_s
from launch.observe.iterations import Iteration
from megatron_ext.contract.adaptive.config import AdaptConfig

NOISE = AdaptConfig("noise", 0.3, 8, 640, 100, 0.1, 4, "sqrt", rebalance=False)


def seen(adapt: AdaptConfig | None, *lines: tuple[int, int, float]) -> Any:
    """Of a run of 4,800 samples; lines have iteration, consumed samples and milliseconds of an iteration."""
    log = [
        Iteration(iteration=n, unix=1.0, elapsed_ms=ms, loss=1.0, nan=0, consumed_samples=consumed)
        for n, consumed, ms in lines
    ]
    train = SimpleNamespace(samples=4800, eval_interval=None, log_interval=10)
    return SimpleNamespace(
        log=log,
        times=[LineTime(n, ms, consumed) for n, consumed, ms in lines],
        over=False,
        iterations=600,
        adapts=adapt is not None,
        plan=SimpleNamespace(train=train, global_batch_size=8),
    )


GROWN = ((10, 80, 50.0), (20, 160, 50.0), (30, 240, 50.0), (40, 1840, 900.0))


def test_a_batch_that_has_grown_is_not_late_by_the_pace_of_the_first_lines() -> None:
    assert usual_s(seen(NOISE, *GROWN)) == pytest.approx(9.0)
    assert usual_s(seen(None, *GROWN)) == pytest.approx(0.5)


def test_what_is_left_is_counted_in_samples_where_the_batch_adapts() -> None:
    assert left_s(seen(NOISE, *GROWN)) == pytest.approx((4800 - 1840) * 0.9 / 160)
    assert left_s(seen(NOISE, GROWN[0])) == pytest.approx((4800 - 80) * 0.05 / 8)
    assert left_s(seen(None, *GROWN)) == pytest.approx(560 * 0.05)


def test_the_pace_is_that_of_the_newest_batch_over_all_of_its_lines() -> None:
    again = seen(NOISE, *GROWN, (50, 3440, 700.0))
    assert samples_per_s(again) == pytest.approx(3200 / (10 * 0.9 + 10 * 0.7))
    assert left_s(again) == pytest.approx((4800 - 3440) / 200)
    assert samples_per_s(seen(NOISE, *GROWN[:3])) == pytest.approx(160.0)
    assert samples_per_s(seen(None, *GROWN)) == pytest.approx(160.0)
    assert samples_per_s(seen(NOISE)) is None
