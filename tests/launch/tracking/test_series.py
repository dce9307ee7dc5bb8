"""Points of series from lines of metrics.jsonl."""

from __future__ import annotations

import pytest

from launch.tracking.series import Points, Scale

PLAIN = Scale(tokens_per_sample=0, price_per_hour=None, log_interval=10)
LINE = {
    "iteration": 10,
    "unix": 1.8e9,
    "consumed_samples": 160,
    "elapsed_ms": 36e3,
    "learning_rate": 1e-3,
    "loss": 4.5,
    "loss_scale": 1.0,
    "grad_norm": None,
    "tokens_per_s": 70.0,
    "skipped": 0,
    "nan": 0,
}


def test_series_have_the_names_that_people_look_for() -> None:
    point = Points(PLAIN).of({**LINE, "right": 0.5, "valid_loss": 4.0, "valid_bleu": 11.5, "evaluation_s": 2.0})
    assert (point.iteration, point.unix) == (10, 1.8e9)
    assert point.values == {
        "samples": 160,
        "iteration_ms": 36e3,
        "lr": 1e-3,
        "train/loss": 4.5,
        "loss_scale": 1.0,
        "throughput/tokens_per_s": 70.0,
        "train/skipped": 0,
        "train/nan": 0,
        "train/right": 0.5,
        "valid/loss": 4.0,
        "valid/bleu": 11.5,
        "valid/seconds": 2.0,
    }


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "4", [1]], ids=str)
def test_what_is_no_finite_number_is_no_point(value: object) -> None:
    assert "train/loss" not in Points(PLAIN).of({**LINE, "loss": value}).values


def test_tokens_and_dollars_follow_where_they_are_known() -> None:
    points = Points(Scale(tokens_per_sample=128, price_per_hour=5.0, log_interval=10))
    first = points.of(LINE)
    assert (first.values["tokens"], first.values["cost"]) == (160 * 128, pytest.approx(10 * 36 / 3600 * 5))
    second = points.of({**LINE, "iteration": 12, "evaluation_s": 72.0})
    assert second.values["cost"] == pytest.approx((12 * 36 + 72) / 3600 * 5)
    assert points.of({**LINE, "iteration": 20, "cost": 9.0}).values["cost"] == 9.0


def test_a_run_that_goes_on_from_another_one_has_not_paid_for_that() -> None:
    points = Points(Scale(tokens_per_sample=0, price_per_hour=3600.0, log_interval=10))
    assert points.of({**LINE, "iteration": 1010, "elapsed_ms": 1e3}).values["cost"] == pytest.approx(10)
