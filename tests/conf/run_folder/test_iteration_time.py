"""One iteration time: the median over the lines of the log after the first, per sample where the batch changes."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.iteration_time import SIGMA, LineTime, Spread, iteration_time


def lines(*of: tuple[int, float, int | None]) -> list[LineTime]:
    return [LineTime(iteration=number, elapsed_ms=ms, consumed_samples=samples) for number, ms, samples in of]


def test_the_first_line_has_the_start_up_in_it_and_does_not_count():
    time = iteration_time(lines((10, 900, 80), (20, 100, 160), (30, 104, 240), (40, 110, 320)))
    assert time is not None
    assert (time.ms, time.unit, time.basis) == (104, "per iteration", "median of 3 log lines after the first")


def test_a_line_that_is_alone_counts_and_is_called_so():
    time = iteration_time(lines((10, 900, 80)))
    assert time is not None
    assert (time.ms, time.alone, time.basis) == (900, True, "the only log line, with the start-up in it")
    assert math.isnan(time.spread.half)
    assert iteration_time([]) is None


def test_of_an_iteration_that_was_run_twice_the_later_line_counts():
    time = iteration_time(lines((1, 900, 8), (2, 100, 16), (3, 5000, 24), (3, 101, 24), (4, 102, 32)))
    assert time is not None
    assert time.each_ms == (100, 101, 102)


def test_where_the_batch_changes_times_are_per_sample():
    time = iteration_time(lines((10, 900, 80), (20, 80, 160), (30, 320, 480), (40, 324, 800)))
    assert time is not None
    assert (time.per_sample, time.unit) == (True, "per sample")
    assert time.each_ms == (10, 10, 10.125)


@pytest.mark.parametrize("samples", [(80, 160, 240), (None, 160, 240), (80, None, 400), (80, 80, 400)])
def test_a_batch_that_stays_or_is_not_known_is_no_changing_one(samples: tuple[int | None, ...]):
    time = iteration_time(lines(*((10 * (at + 1), 100.0, one) for at, one in enumerate(samples))))
    assert time is not None
    assert not time.per_sample


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=40))
def test_the_spread_is_half_of_what_the_middle_two_thirds_take(values: list[float]):
    found = Spread.of(values)
    low, high = np.quantile(values, SIGMA, method="weibull")
    assert found.median == statistics.median(values)
    assert found.half == pytest.approx((high - low) / 2)
    assert found.count == len(values)
