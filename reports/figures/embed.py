"""Plotly figures in a page that opens offline: their JSON, and the script of the installed Plotly package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from html import escape
from typing import Any

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from reports.figures.page import data, page, static
from reports.figures.tasks import COMPUTE, LANES, OTHER, TASKS, Look
from reports.figures.template import COLOURS
from reports.figures.timeline import page_layout

CONFIG = {
    "displaylogo": False,
    "showSendToCloud": False,  # Plotly shows a button that uploads a chart unless it is told otherwise
    "plotlyServerURL": "",
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "resetScale2d"],
}
UNUSED = ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]
"""Buttons of no use beside a small figure."""
NOTHING = '<p class="none">nothing to draw yet</p>'


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """Plotly's own script, as the installed package has it."""
    return str(get_plotlyjs())


def embedded(figure: go.Figure, label: str) -> str:
    """A figure in a page made by `page_with_figures`, as HTML.

    Args:
        label: what the figure shows, for those who cannot see it.
    """
    content = figure.to_json().replace("<", "\\u003c")
    place = f'class="plot" role="img" aria-label="{escape(label)}" style="min-height: {figure.layout.height}px"'
    return f'<figure class="chart"><div {place}></div><script type="application/json">{content}</script></figure>'


def page_with_figures(title: str, body: str) -> str:
    """A whole page, with what draws the figures in its body where there are any."""
    if 'class="plot"' not in body:
        return page(title, body)
    return page(title, f"{body}\n{shared()}", [plotly_script(), static("theme.js"), static("figures.js")])


def shared() -> str:
    """What all figures of a page share, for `static/theme.js`: which colours change by night, how Plotly behaves."""
    themed = {colour: f"--{name}" for name, colour in COLOURS.items()}
    return data("plotly", {"themed": themed, "config": CONFIG, "unused": UNUSED})


def timeline_parts() -> str:
    """The same for a page that draws timelines, with their layout (`static/plot.js`) and how tasks look."""
    return f"{shared()}\n{data('layout', page_layout())}\n{looks()}"


def looks() -> str:
    """How tasks look, for `static/colours.js`."""
    return data(
        "looks",
        {
            "lanes": LANES,
            "compute": asdict(COMPUTE),
            "other": _look(OTHER),
            "tasks": {name: _look(look) for name, look in TASKS.items()},
        },
    )


def _look(look: Look) -> Mapping[str, Any]:
    return {**asdict(look.place), "light": look.light, "dark": look.dark}
