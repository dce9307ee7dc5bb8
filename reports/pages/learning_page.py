"""The page of a rehearsal of learning: the plans in their order, quality against samples and against predicted time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd
from plotly import graph_objects as go

from reports.figures.chart import lines
from reports.figures.embed import SERIES, SOFT, embedded, page_with_figures
from reports.figures.page import bullets, copyable
from reports.figures.page import table as html_table


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Of a plan, evaluation by evaluation: the mean of its seeds, and their lowest and highest."""

    name: str
    samples: Sequence[int]
    seconds: Sequence[float] | None
    """Predicted; None where nobody knows."""
    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


def render(
    command: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    plans: Sequence[Quality],
    metric: str,
    goal: float | None,
) -> str:
    """The page, as HTML. `rows` are those of the plans under `head`, the first one first; of several plans the first of
    the `notes` says which one that is."""
    timed = [plan for plan in plans if plan.seconds is not None]
    title, *notes = notes if len(plans) > 1 else [plans[0].name, *notes]
    body = [
        f'<header><p class="crumbs">tdpp rehearse learning</p><h1>{escape(title)}</h1></header><main>',
        f'<section class="verdict good">{bullets(notes)}{copyable(command)}</section>',
        f"<section><h2>Plans</h2>{html_table(head, rows)}</section>",
        _section(f"{metric} against samples", "samples", plans, [plan.samples for plan in plans], goal),
    ]
    if timed:
        seconds = [plan.seconds or () for plan in timed]
        unit, size = ("hours", 3600.0) if max(map(max, seconds)) >= 7200 else ("seconds", 1.0)
        scaled = [[one / size for one in of] for of in seconds]
        body.append(_section(f"{metric} against predicted time", f"predicted {unit}", timed, scaled, goal))
    return page_with_figures("Learning rehearsal – tdpp", "\n".join([*body, "</main>"]))


def _section(
    title: str, x_title: str, plans: Sequence[Quality], places: Sequence[Sequence[float]], goal: float | None
) -> str:
    return f"<section>{embedded(drawn(title, x_title, plans, places, goal), title)}</section>"


def drawn(
    title: str, x_title: str, plans: Sequence[Quality], places: Sequence[Sequence[float]], goal: float | None
) -> go.Figure:
    """A line for each plan, in a band from its lowest to its highest seed, and the goal across."""
    series = [pd.Series(plan.means, index=x, name=plan.name) for plan, x in zip(plans, places, strict=True)]
    made = lines(series, x_title=x_title, title=title)
    for number, (plan, x) in enumerate(zip(plans, places, strict=True)):
        if plan.lows == plan.highs:
            continue
        made.add_scatter(
            x=[*x, *reversed(x)],
            y=[*plan.highs, *reversed(plan.lows)],
            fill="toself",
            fillcolor=SERIES[number % len(SERIES)],
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
    if goal is not None and math.isfinite(goal):
        made.add_hline(y=goal, line={"color": SOFT, "dash": "dash", "width": 1})
    return made
