"""Plotly figures in a page that opens offline: their JSON, and the script of the installed Plotly package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from html import escape, unescape
from typing import Any

from plotly import graph_objects as go
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from reports.figures.page import data, page, static
from reports.figures.tasks import COMPUTE, LANES, OTHER, TASKS, Look

COLOURS = {
    "text": "#1b2027",
    "soft": "#5a6472",
    "line": "#dfe3e8",
    "border": "#b6bec9",
    "raised": "#ffffff",
    "series1": "#0067a5",
    "series2": "#cf5a00",
    "series3": "#7fb8de",
    "series4": "#00875f",
}
"""Colours by the name of the variable in `static/page.css` that has the same by day, and its counterpart by night."""
TEXT, SOFT, LINE, BORDER, RAISED = (COLOURS[name] for name in ("text", "soft", "line", "border", "raised"))
SERIES = tuple(COLOURS[f"series{number}"] for number in (1, 2, 3, 4))
CLEAR = "rgba(0,0,0,0)"

_AXIS = {"gridcolor": LINE, "zeroline": False, "automargin": True, "title": {"standoff": 6, "font": {"size": 12}}}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": SOFT},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "colorway": SERIES,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": RAISED, "bordercolor": LINE, "font": {"color": TEXT}},
        "modebar": {"bgcolor": CLEAR, "color": SOFT, "activecolor": TEXT},
        "margin": {"l": 56, "r": 12, "t": 30, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
)


def figure(*, title: str = "", height: int = 260, **layout: Any) -> go.Figure:
    """An empty figure with the template."""
    made = go.Figure()
    heading = {"text": title, "font": {"size": 13}, "x": 0, "xref": "container", "y": 1, "yref": "container"}
    heading |= {"yanchor": "top", "pad": {"t": 4, "l": 4}}
    made.update_layout(template=TEMPLATE, height=height, title=heading if title else None, **layout)
    return made


CONFIG = {
    "displaylogo": False,
    "showSendToCloud": False,  # Plotly shows a button that uploads a chart unless it is told otherwise
    "plotlyServerURL": "",
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "resetScale2d"],
}
TITLE = 18
"""Pixels of a figure for its title, which a page has above the figure."""
UNUSED = ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]
"""Buttons of no use beside a small figure."""
TIMELINE = ("unpack.js", "colours.js", "bars.js", "chart.js", "axis.js", "links.js", "gestures.js", "touch.js")
"""The scripts that draw rows of events, after `scheme.js`; they need `looks`."""
NOTHING = '<p class="none">nothing to draw</p>'


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """Plotly's own script, as the installed package has it."""
    return str(get_plotlyjs())


def embedded(figure: go.Figure, label: str) -> str:
    """A figure in a page made by `page_with_figures`, as HTML. Its title stands above it, where no legend can reach it.

    Args:
        label: what the figure shows, for those who cannot see it.
    """
    given = figure.to_dict()
    layout = given["layout"]
    title = layout.pop("title", {}).get("text")
    if title:
        margin = layout.setdefault("margin", {})
        margin["t"] = margin.get("t", TEMPLATE.layout.margin.t) - TITLE
        layout["height"] -= TITLE
    caption = f"<figcaption>{escape(unescape(title))}</figcaption>" if title else ""
    content = to_json(given, validate=False).replace("<", "\\u003c")
    place = f'class="plot" role="img" aria-label="{escape(label)}" style="min-height: {layout["height"]}px"'
    drawn = f'<div {place}></div><script type="application/json">{content}</script>'
    return f'<figure class="chart">{caption}{drawn}</figure>'


def page_with_figures(title: str, body: str, scripts: Sequence[str] = (), *, draws: bool = False) -> str:
    """A whole page, with what draws the figures in its body where there are any.

    Args:
        scripts: others of `reports/static`, after `scheme.js`.
        draws: whether it will have figures, even if it has none now.
    """
    own = [static(name) for name in ("scheme.js", *scripts)] if scripts else []
    if not draws and 'class="plot' not in body:
        return page(title, body, own)
    drawing = [plotly_script(), *([] if own else [static("scheme.js")]), *map(static, ("theme.js", "figures.js"))]
    return page(title, f"{body}\n{shared()}", [*own, *drawing])


def shared() -> str:
    """What all figures of a page share, for `static/theme.js`: which colours change by night, how Plotly behaves."""
    themed = {colour: f"--{name}" for name, colour in COLOURS.items()}
    return data("plotly", {"themed": themed, "config": CONFIG, "unused": UNUSED})


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
