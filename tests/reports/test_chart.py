"""Charts show what they are given."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.figures.chart import MOST, Series, lines, thinned, ticks


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6), count=st.integers(2, 10))
def test_ticks_are_round_inside_the_range_and_about_as_many_as_asked(low: float, span: float, count: int):
    found = ticks(low, low + span, count)
    step = found[1] - found[0] if len(found) > 1 else span
    assert count / 2.5 - 1 <= len(found) <= count + 1
    assert all(low - step * 1e-6 <= tick <= low + span + step * 1e-6 for tick in found)


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle[^>]* cx="([\d.]+)" cy="([\d.]+)"', svg)]


def test_every_finite_point_is_drawn_in_its_place():
    svg = lines([Series("loss", [1, 2, 3], [4.0, 2.0, 3.0])], x_title="iteration", y_title="loss", label="loss")
    (x1, y1), (x2, y2), (x3, y3) = circles(svg)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert (y3 - y1) == pytest.approx((y2 - y1) / 2, abs=0.2)
    assert y1 < y3 < y2


@pytest.mark.parametrize(
    ("last", "shown"), [(3.0, "1 2 3"), (1.3, "1 1.05 1.1 1.15 1.2 1.25 1.3")], ids=["whole", "parts"]
)
def test_between_iterations_there_is_no_tick(last: float, shown: str):
    drawn = lines([Series("a", [1.0, last], [5.0, 5.0])], x_title="x", y_title="y", label="l")
    assert re.findall(r'<text x="[\d.]+" y="222" text-anchor="middle">([^<]*)<', drawn) == shown.split()


def test_a_value_that_is_not_finite_breaks_the_line():
    svg = lines([Series("loss", range(5), [1, 2, math.nan, 2, 1])], x_title="iteration", y_title="loss", label="loss")
    assert svg.count("<polyline") == 2
    assert len(circles(svg)) == 4


def test_names_are_escaped():
    svg = lines([Series("<b>", [1], [1])], x_title="<x>", y_title="<y>", label='"<l>"')
    assert not re.search(r"<b>|<x>|<y>|<l>", svg)


def test_without_a_finite_value_it_says_so():
    assert "nothing to draw" in lines([Series("loss", [1], [math.nan])], x_title="i", y_title="loss", label="loss")


@given(seed=st.integers(0, 2**32), length=st.integers(MOST + 1, 20 * MOST), gaps=st.booleans(), at=st.integers(0, MOST))
@settings(max_examples=20)
def test_a_long_series_keeps_its_extremes_and_gaps_in_few_points(seed: int, length: int, gaps: bool, at: int):
    source = random.Random(seed)
    y = [math.nan if gaps and source.random() < 0.1 else source.uniform(-9, 9) for _ in range(length)]
    y[at] = 10.0
    found = thinned(Series("loss", list(range(length)), y))
    assert len(found.y) <= MOST
    finite = [value for value in found.y if not math.isnan(value)]
    assert (min(finite), max(finite)) == (min(value for value in y if not math.isnan(value)), 10.0)
    assert any(map(math.isnan, found.y)) == any(map(math.isnan, y))
    assert all(repr(value) == repr(y[int(x)]) for x, value in zip(found.x, found.y, strict=True))
