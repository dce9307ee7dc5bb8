"""Charts of quantities over iterations or time, of many things with the same quantities, and bars made of parts, as
Plotly figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from reports.figures.embed import BORDER, CLEAR, RAISED, SERIES, SOFT, figure

MOST = 1200
"""Points of a series."""
FEW = 12
"""Iterations, up to which each has a tick."""


def thinned(values: pd.Series) -> pd.Series:
    """At most MOST points: of each span of a longer series the lowest and the highest, and its first gap.

    A chart is some hundred pixels wide, and a page has to carry every point.
    """
    if len(values) <= MOST:
        return values
    ordered, span = values.reset_index(drop=True), -(-len(values) * 3 // MOST)
    finite = np.isfinite(ordered)
    known, gaps = ordered[finite], ordered.index[~finite].to_series()
    spans = known.groupby(known.index // span)
    return values.iloc[sorted({*spans.idxmin(), *spans.idxmax(), *gaps.groupby(gaps // span).first()})]


def lines(series: Sequence[pd.Series], *, x_title: str, title: str, from_zero: bool = False) -> go.Figure:
    """A chart of one or more series over a common x, their index; a value that is missing breaks the line. `from_zero`:
    let the y axis begin at 0."""
    several = len(series) > 1
    made = figure(title=escape(title), showlegend=several, height=280 if several else 260)
    made.update_layout(margin_t=54 if several else 30)  # under the title there is a legend, or none
    made.update_xaxes(title_text=escape(x_title))
    made.update_yaxes(rangemode="tozero" if from_zero else "normal")
    for one in map(thinned, series):
        name = escape(str(one.name))
        made.add_scatter(
            x=one.index.tolist(),
            y=one.tolist(),
            name=name,
            mode="lines+markers",
            marker={"size": 4},
            line={"width": 1.8},
            hovertemplate=f"{name}: %{{y:.6~g}} at {escape(x_title)} %{{x:~g}}<extra></extra>",
        )
    places = {float(x) for one in series for x in one.index}
    if places and all(map(float.is_integer, places)) and max(places) - min(places) <= FEW:
        made.update_xaxes(dtick=1)  # of an iteration there is no half
    return made


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something to draw."""

    name: str
    link: str
    """To a page of its own; empty if it has none."""
    tone: str
    """`best`, `front`, or nothing: how it is set off."""
    label: str = ""
    """What stands beside its dot, where there is room."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One quantity of all items, in their order; text, or numbers of which NaN is not known."""

    title: str
    values: Sequence[str | float]
    unit: str = ""
    halves: Sequence[float] = ()
    """How far each number may be off to both sides; empty where that is not known."""
    from_zero: bool = False
    """Whether it begins at 0, so that what differs little looks like that; else at the least value."""

    @property
    def worded(self) -> bool:
        """Whether its values are text."""
        return bool(self.values) and isinstance(self.values[0], str)

    def text(self, item: int) -> str:
        value = self.values[item]
        return value if isinstance(value, str) else f"{value:,.6g}"

    def marks(self) -> list[tuple[str, float]]:
        """Texts beside the axis, and where they are, from 0 below to 1 above: of text every value, of numbers the
        least, the largest and three between."""
        if self.worded:
            texts = sorted({str(value) for value in self.values}, key=_natural)
            steps = len(texts) - 1 or 1
            return [(text, index / steps if len(texts) > 1 else 0.5) for index, text in enumerate(texts)]
        low, high = self._range()
        if math.isnan(low):
            return []
        shares = (0.0, 0.25, 0.5, 0.75, 1.0) if high > low else (0.5,)
        step = abs((high - low) / 4 if high > low else low)
        decimals = max(0, 1 - math.floor(math.log10(step))) if step else 0  # as tell apart what differs by that
        return [(f"{low + share * (high - low) if high > low else low:,.{decimals}f}", share) for share in shares]

    def place(self, item: int) -> float:
        """From 0 below to 1 above; NaN if it is not known."""
        if self.worded:
            return dict(self.marks())[self.text(item)]
        low, high = self._range()
        value = float(self.values[item])
        return value if math.isnan(value) else (value - low) / (high - low) if high > low else 0.5

    def range_around(self, items: Sequence[int]) -> list[float]:
        """The ends of an axis on which these items, whose numbers are known, their errors and labels have room."""
        values = [float(self.values[item]) for item in items]
        ends = [*values, 0.0] if self.from_zero else values
        room = (max(ends) - min(ends) or abs(max(ends)) or 1.0) * MARGIN
        halves = [self.halves[item] for item in items] if self.halves else []
        most = max([0.0, *(half for half in halves if half > 0)])
        return [0 if self.from_zero else min(values) - room, max(values) + most + room]

    def _range(self) -> tuple[float, float]:
        known = [float(value) for value in self.values if not math.isnan(float(value))]
        low = min([0.0, *known]) if self.from_zero else min(known, default=math.nan)
        return (low, max(known)) if known else (math.nan, math.nan)


def _natural(text: str) -> tuple[float, str]:
    """Numbers by size, before all other texts."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


TONES = {"": (SOFT, 1.2, 7), "front": (SERIES[0], 2.0, 9), "best": (SERIES[1], 3.5, 12)}
"""Colour, width of a line and size of a dot, in the order in which they are drawn."""
MOST_MARKS = 14
"""Beside an axis; of more values only some are written, for they would lie over each other."""
LONGEST_MARK = 18
GAP = 150
"""Pixels between two axes."""


def parallel(items: Sequence[Item], axes: Sequence[Axis]) -> go.Figure:
    """A line for each item across all axes; one whose value is not known on some axis has a gap there."""
    made = figure(
        height=340,
        width=max(560, 120 + GAP * len(axes)),
        showlegend=False,
        xaxis={"range": [-0.4, len(axes) - 0.3], "showgrid": False, "side": "top", "fixedrange": True},
        yaxis={"visible": False, "range": [-0.06, 1.06], "fixedrange": True},
        margin={"l": 20, "r": 60, "t": 40, "b": 10},
    )
    made.update_xaxes(tickvals=list(range(len(axes))), ticktext=[escape(axis.title) for axis in axes])
    for index in sorted(range(len(items)), key=lambda index: list(TONES).index(items[index].tone)):
        item = items[index]
        colour, width, _ = TONES[item.tone]
        tip = "<br>".join(
            escape(text) for text in [item.name, *(f"{axis.title} {axis.text(index)}{axis.unit}" for axis in axes)]
        )
        made.add_scatter(
            x=list(range(len(axes))),
            y=[axis.place(index) for axis in axes],
            mode="lines+markers",
            marker={"size": 5, "color": colour},
            line={"width": width, "color": colour},
            opacity=1.0 if item.tone else 0.65,
            customdata=[item.link] * len(axes),
            hovertemplate=f"{tip}<extra></extra>",
        )
    for number, axis in enumerate(axes):
        made.add_shape(type="line", x0=number, x1=number, y0=0, y1=1, line={"color": BORDER, "width": 1.5})
        marks = axis.marks()
        for text, share in marks[:: -(-len(marks) // MOST_MARKS) or 1]:
            made.add_annotation(
                x=number,
                y=share,
                text=escape(text if len(text) <= LONGEST_MARK else f"{text[: LONGEST_MARK - 1]}…"),
                showarrow=False,
                xanchor="left",
                xshift=6,
                bgcolor=RAISED,  # a line that goes through a label makes it hard to read
                borderpad=1,
            )
    return made


def dots(items: Sequence[Item], x: Axis, y: Axis) -> go.Figure:
    """A dot for each item of which both numbers are known, a line through those on the front; the others are pale."""
    there = [
        at for at, pair in enumerate(zip(x.values, y.values, strict=True)) if not math.isnan(sum(map(float, pair)))
    ]
    known = [(float(x.values[at]), float(y.values[at]), items[at]) for at in there]
    made = figure(height=320, showlegend=False, xaxis_title=escape(x.title), yaxis_title=escape(y.title))
    front = sorted((a, b) for a, b, item in known if item.tone)
    made.add_scatter(
        x=[a for a, _ in front],
        y=[b for _, b in front],
        mode="lines",
        line={"color": SERIES[0], "width": 1.5},
        hoverinfo="skip",
    )
    made.add_scatter(
        x=[a for a, _, _ in known],
        y=[b for _, b, _ in known],
        mode="markers",
        marker={
            "color": [TONES[item.tone][0] for _, _, item in known],
            "size": [TONES[item.tone][2] for _, _, item in known],
            "opacity": [1.0 if item.tone else 0.4 for _, _, item in known],
        },
        customdata=[item.link for _, _, item in known],
        text=[escape(item.name) for _, _, item in known],
        error_x=_bars([x.halves[at] for at in there] if x.halves else []),
        error_y=_bars([y.halves[at] for at in there] if y.halves else []),
        hovertemplate=f"%{{text}}: %{{x:.6~g}}{escape(x.unit)}, %{{y:.6~g}}{escape(y.unit)}<extra></extra>",
    )
    for name, axis in (("xaxis", x), ("yaxis", y)):
        if there:
            made.update_layout({name: {"range": axis.range_around(there)}})
    last = max((a for a, _, _ in known), default=0.0)
    wide = last - min((a for a, _, _ in known), default=0.0)
    for a, b, item in _apart(known):
        fits = a + len(item.label) * LETTER_SHARE * wide < last + MARGIN * wide
        side = {"xanchor": "left", "xshift": 5} if fits else {"xanchor": "right", "xshift": -5}
        made.add_annotation(x=a, y=b, text=escape(item.label), showarrow=False, yanchor="bottom", yshift=2, **side)
    return made


def _bars(halves: Sequence[float]) -> dict[str, object]:
    """Around dots, how far they may be off."""
    shown = [0.0 if math.isnan(half) else half for half in halves]
    return {"array": shown, "visible": any(shown), "thickness": 1, "width": 3, "color": SOFT}


LETTER_SHARE = 0.0125
"""A letter's part of the width of a chart."""
MARGIN = 0.08
"""What is left free around the data, as a part of their width and height."""
LABEL_ROOM = (0.05, 0.07)
"""Within these parts of a chart's width and height around a label there is no other."""
LETTER = 0.6
"""What a letter of a label takes of the width in LABEL_ROOM."""


def _apart(points: Sequence[tuple[float, float, Item]]) -> list[tuple[float, float, Item]]:
    """Returns the labelled points on the front whose labels do not overlap, the best first."""
    if not points:
        return []
    width, height = (max(values) - min(values) or 1.0 for values in ([p[0] for p in points], [p[1] for p in points]))
    kept: list[tuple[float, float, Item]] = []
    for a, b, item in sorted(points, key=lambda point: point[2].tone != "best"):
        wide = LABEL_ROOM[0] * width * max(1.0, len(item.label) * LETTER)
        near = (abs(a - x) < wide and abs(b - y) < LABEL_ROOM[1] * height for x, y, _ in kept)
        if item.label and item.tone and not any(near):
            kept.append((a, b, item))
    return kept


ROWS = (30, 18)
"""Pixels of a bar, where there are few and where there are MANY."""
MANY = 16


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of what every bar is made of."""

    name: str
    values: Sequence[float]
    """A value for each bar."""
    colour: str
    hatched: bool = False


def rows_height(count: int) -> int:
    """Pixels of so many bars, one below the other."""
    return count * ROWS[count > MANY]


def stacked(rows: Sequence[str], parts: Sequence[Part], title: str) -> go.Figure:
    """A bar for each row, from above to below, of the parts one after another, in milliseconds."""
    made = figure(
        title=escape(title),
        height=110 + rows_height(len(rows)),
        barmode="stack",
        bargap=0.25,
        margin={"l": 20, "r": 12, "t": 70, "b": 40},
        legend={"traceorder": "normal", "font": {"size": 11}},  # two columns on a phone
    )
    for part in parts:
        pattern = {"shape": "/", "fillmode": "replace", "bgcolor": CLEAR, "size": 6} if part.hatched else None
        made.add_bar(
            name=escape(part.name),
            orientation="h",
            x=list(part.values),
            y=[escape(row) for row in rows],
            marker={"color": part.colour, "pattern": pattern, "line": {"width": 0}},
            hovertemplate=f"%{{y}}: {escape(part.name)} %{{x:,.1f}} ms<extra></extra>",
        )
    made.update_yaxes(autorange="reversed", showgrid=False, type="category", ticklabelstandoff=6)
    made.update_xaxes(ticksuffix=" ms")
    return made
