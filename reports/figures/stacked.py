"""Bars that are made of parts, such as an iteration of each stage, as a Plotly figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plotly import graph_objects as go

from reports.figures.embed import CLEAR, figure

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


def stacked(rows: Sequence[str], parts: Sequence[Part], *, title: str, unit: str) -> go.Figure:
    """A bar for each row, from above to below, of the parts one after another."""
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
            hovertemplate=f"%{{y}}: {escape(part.name)} %{{x:,.1f}} {escape(unit)}<extra></extra>",
        )
    made.update_yaxes(autorange="reversed", showgrid=False, type="category", ticklabelstandoff=6)
    made.update_xaxes(ticksuffix=f" {escape(unit)}")
    return made
