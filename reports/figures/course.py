"""Charts one above the other over one x axis, with what `static/course.js` draws them from and lets a reader choose."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from reports.facts.course import ITERATION, Chart, Line
from reports.figures.chart import MOST, thinned
from reports.figures.embed import SERIES, SOFT, figure
from reports.figures.page import data

DIGITS = 7
"""Significant ones of a number in the page."""
SPANS = 600
"""Spans whose means are smoothed, instead of the points of a line that has more than MOST."""
SCRIPTS = ("course.js", "cursor.js")
CONTROLS = """<div class="controls" id="course-controls">
<label>x axis <select id="course-x"></select></label>
<label>smoothing <input type="range" id="course-smoothing" min="0" max="0.99" step="0.01"><output></output></label>
<label><input type="checkbox" id="course-log-x"> logarithmic x</label>
<label><input type="checkbox" id="course-log-y"> logarithmic y</label>
<label>cursor <input type="range" id="course-cursor" min="0" step="1"></label>
<button type="button" id="course-whole" disabled>Whole course</button>
<details id="course-choice"><summary></summary><div></div></details>
</div>
<p class="note" id="course-at">Point at a chart, or move the cursor with the arrow keys, to read all values there. Drag,
or press + and − there, to zoom; 0 shows everything.</p>"""


Axes = Mapping[str, pd.Series]
"""What may be the x axis instead of the iterations, by iteration."""


def course_charts(charts: Sequence[Chart], axes: Axes, before: Axes | None = None) -> str:
    """The charts with their controls, as HTML; the page needs `SCRIPTS`. `before` is for the lines of that kind."""
    label = f"{', '.join(chart.title for chart in charts)} over iterations"
    return (
        f'{CONTROLS}<figure class="chart course" id="course"><div class="plot course" role="img" '
        f'aria-label="{escape(label)}"></div></figure>{data("course-data", course_data(charts, axes, before))}'
    )


def course_data(charts: Sequence[Chart], axes: Axes, before: Axes | None = None) -> Mapping[str, Any]:
    """What `static/course.js` says that it needs."""
    places: dict[tuple[int, ...], int] = {}

    def points(values: pd.Series) -> dict[str, Any]:
        """Numbers, null where one is not finite, and which of the lists of iterations has theirs."""
        at = places.setdefault(tuple(int(x) for x in values.index), len(places))
        return {"at": at, "y": [_number(y) for y in values.to_numpy("float64")]}

    def line(one: Line) -> dict[str, Any]:
        found: dict[str, Any] = {"name": one.name, "kind": one.kind, **points(thinned(one.values))}
        if len(lost := one.values[~np.isfinite(one.values)]):
            found["lost"] = [len(lost), int(lost.index[0])]
        if len(one.values) > MOST:
            means, each = _means(one.values)
            found["means"] = {**points(means), "each": each}
        return found

    drawn = [
        {"key": chart.key, "title": chart.title, "zero": chart.from_zero, "lines": [line(one) for one in chart.lines]}
        for chart in charts
    ]
    return {
        "layout": json.loads(figure(showlegend=False, hovermode=False).to_json())["layout"],
        "series": SERIES,
        "soft": SOFT,
        "axes": [{"name": ITERATION}, *({"name": name, **points(_rows(axes[name]))} for name in axes)],
        "before": [{"name": name, **points(_rows(values))} for name, values in (before or {}).items()],
        "charts": drawn,
        "places": [*places],
    }


def _rows(values: pd.Series) -> pd.Series:
    """At most about MOST of an axis; those between follow from their neighbours."""
    step = -(-len(values) // MOST)
    return values if step == 1 else values.iloc[sorted({*range(0, len(values), step), len(values) - 1})]


def _means(values: pd.Series) -> tuple[pd.Series, int]:
    """Returns the means of SPANS spans of equal length, each at its last iteration, and that length."""
    each, finite = -(-len(values) // SPANS), values[np.isfinite(values)]
    spans = finite.groupby(np.arange(len(finite)) // each)
    lasts = finite.index[np.minimum(np.arange(1, spans.ngroups + 1) * each, len(finite)) - 1]
    return pd.Series(spans.mean().to_numpy(), lasts), each


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else float(f"{value:.{DIGITS}g}")
