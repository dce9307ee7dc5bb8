"""Charts show what they are given."""

from __future__ import annotations

import json
import math
import random
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.figures.chart import MOST, Axis, Item, dots, lines, parallel, thinned
from reports.figures.embed import TEMPLATE

NUMBERS = Axis(title="n", values=[1.0])


def test_every_point_is_drawn_in_its_place_and_what_is_not_known_breaks_the_line():
    made = lines([pd.Series([1, 2, math.nan, 2, 1], range(5), name="loss")], x_title="iteration", title="loss")
    (trace,) = made.data
    assert (list(trace.x), trace.mode, trace.connectgaps) == ([0, 1, 2, 3, 4], "lines+markers", None)
    assert json.loads(made.to_json())["data"][0]["y"] == [1, 2, None, 2, 1]


@pytest.mark.parametrize(("last", "step"), [(3.0, 1), (1.3, None), (300.0, None)], ids=["few", "parts", "many"])
def test_between_a_few_iterations_there_is_no_tick(last: float, step: int | None):
    assert lines([pd.Series([5.0, 5.0], [1.0, last], name="a")], x_title="x", title="y").layout.xaxis.dtick == step


def test_names_are_shown_as_they_are():
    made = lines([pd.Series([1], [1], name="<b>"), pd.Series([2], [1], name="c")], x_title="<x>", title="<y>")
    made = made.add_traces(dots([Item(name="<i>", link="", tone="best")], NUMBERS, NUMBERS).data)
    made = made.add_traces(parallel([Item(name="<u>", link="", tone="")], [Axis(title="<s>", values=["<t>"])]).data)
    assert not re.search(r"<[bixyust]>", made.to_json().replace("\\u003c", "<"))


def test_every_item_is_a_dot_where_both_numbers_are_known_and_the_front_is_joined():
    items = [
        Item(name=name, link=f"{name}.html", tone=tone) for name, tone in zip("abc", ("best", "front", ""), strict=True)
    ]
    made = dots(items, Axis(title="cost", values=[2.0, 1.0, 3.0]), Axis(title="speed", values=[5.0, 4.0, math.nan]))
    front, points = made.data
    assert (list(front.x), list(front.y)) == ([1.0, 2.0], [4.0, 5.0])
    assert (list(points.x), list(points.customdata)) == ([2.0, 1.0], ["a.html", "b.html"])


def test_all_figures_look_alike():
    axes = [Axis(title="a", values=[1.0])]
    item = [Item(name="a", link="", tone="")]
    made = [
        lines([pd.Series([1], [1], name="a")], x_title="x", title="y"),
        dots(item, axes[0], axes[0]),
        parallel(item, axes),
    ]
    assert {one.layout.template.to_plotly_json().__repr__() for one in made} == {TEMPLATE.to_plotly_json().__repr__()}


@given(seed=st.integers(0, 2**32), length=st.integers(MOST + 1, 20 * MOST), gaps=st.booleans(), at=st.integers(0, MOST))
@settings(max_examples=20)
def test_a_long_series_keeps_its_extremes_and_gaps_in_few_points(seed: int, length: int, gaps: bool, at: int):
    source = random.Random(seed)
    y = [math.nan if gaps and source.random() < 0.1 else source.uniform(-9, 9) for _ in range(length)]
    y[at] = 10.0
    found = thinned(pd.Series(y, list(range(length)), name="loss"))
    assert len(found) <= MOST
    finite = [value for value in found if not math.isnan(value)]
    assert (min(finite), max(finite)) == (min(value for value in y if not math.isnan(value)), 10.0)
    assert any(map(math.isnan, found)) == any(map(math.isnan, y))
    assert all(repr(value) == repr(y[int(x)]) for x, value in found.items())
