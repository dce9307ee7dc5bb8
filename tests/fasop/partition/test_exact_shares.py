"""Shares against all shares, and at the size of a large cluster."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasop.partition.exact_shares import Units, least_time

TIMES = st.one_of(st.integers(1, 12).map(float), st.just(float("inf")))


def all_shares(kinds: list[Units], total: int) -> float:
    units = [kind.seconds[: total + 1] for kind in kinds for _ in range(kind.count)]
    return min(
        (
            max(seconds[number] for seconds, number in zip(units, numbers, strict=True))
            for numbers in product(*(range(1, len(seconds)) for seconds in units))
            if sum(numbers) == total
        ),
        default=float("inf"),
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Units], int]:
    total = draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda counts: sum(counts) <= 4))
    return [
        Units(count, np.array([0.0, *draw(st.lists(TIMES, min_size=total, max_size=total))])) for count in counts
    ], total


@settings(max_examples=400, deadline=None)
@given(clusters())
def test_no_shares_take_less(case: tuple[list[Units], int]) -> None:
    """Times that know no order at all, and numbers that no unit can take."""
    kinds, total = case
    found, least = least_time(kinds, total), all_shares(kinds, total)
    if found is None:
        assert least == float("inf")
        return
    assert found.seconds == least
    taken = [(kind, number) for kind, numbers in zip(kinds, found.numbers, strict=True) for number in numbers]
    assert [len(numbers) for numbers in found.numbers] == [kind.count for kind in kinds]
    assert sum(number for _, number in taken) == total
    assert max(float(kind.seconds[number]) for kind, number in taken) <= found.seconds


def test_units_that_are_alike_take_about_the_same() -> None:
    seconds = np.arange(101.0)
    found = least_time([Units(8, seconds), Units(4, 3 * seconds)], 100)
    assert found is not None
    assert max(found.numbers[0]) - min(found.numbers[0]) <= 1
    assert found.seconds == pytest.approx(11)


def test_gaps_that_only_sums_of_some_numbers_can_close() -> None:
    """Three units that take 4 or 7 each reach 12, 15, 18 and 21, and nothing between."""
    seconds = np.full(30, np.inf)
    seconds[4], seconds[7] = 1.0, 2.0
    kinds = [Units(3, seconds)]
    assert [total for total in range(1, 25) if least_time(kinds, total) is not None] == [12, 15, 18, 21]
