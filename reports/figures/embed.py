"""Plotly figures in a page that opens offline: their JSON, the script of the installed package, and how tasks look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from html import escape, unescape
from typing import Any

from plotly import graph_objects as go
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from reports.figures.page import data, page, static

COMMUNICATION, COMPUTATION, DATA = LANES = ("communication", "computation", "data and loss")
"""From above to below. Lanes tell apart what hues cannot."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a rank's row, which goes from -0.5 (above) to 0.5 (below)."""

    lane: str
    top: float
    bottom: float


SEND = Place(lane=COMMUNICATION, top=-0.44, bottom=-0.31)
RECEIVE = Place(lane=COMMUNICATION, top=-0.29, bottom=-0.12)
COMPUTE = Place(lane=COMPUTATION, top=-0.1, bottom=0.26)
ACROSS = Place(lane=COMMUNICATION, top=RECEIVE.top, bottom=COMPUTE.bottom)
"""Communication for which computation stands still: it covers what it lies inside."""
INSIDE = Place(lane=COMPUTATION, top=-0.02, bottom=0.18)
BELOW = Place(lane=DATA, top=0.29, bottom=0.43)


@dataclass(frozen=True)
class Look:
    """How a task is drawn."""

    place: Place
    light: str
    dark: str


# Forward is blue and backward orange; the rest has hues that stay apart for the common kinds of colour blindness (after
# Okabe and Ito 2008). Beside the names of tdpp's engine these are the timers of Megatron-LM.
TASKS = {
    "forward-send": Look(SEND, "#4f9fd0", "#58a6d6"),
    "backward-send": Look(SEND, "#d8a03c", "#c9963c"),
    "forward-recv": Look(RECEIVE, "#bcd9ec", "#2f4f66"),
    "backward-recv": Look(RECEIVE, "#f3d9b8", "#6b4f2a"),
    "forward-send-forward-recv": Look(RECEIVE, "#8fbfe0", "#3c6f94"),
    "backward-send-backward-recv": Look(RECEIVE, "#e8bd85", "#8a6433"),
    "forward-send-backward-recv": Look(RECEIVE, "#dcb9d8", "#7a5477"),
    "backward-send-forward-recv": Look(RECEIVE, "#a9cfc4", "#3f6f62"),
    "forward-backward-send-forward-backward-recv": Look(RECEIVE, "#a9a9b8", "#5d5d70"),
    "grads-all-reduce": Look(RECEIVE, "#a5549b", "#c07ab6"),
    "layernorm-grads-all-reduce": Look(RECEIVE, "#c98bc2", "#8f4f86"),
    "embedding-grads-all-reduce": Look(RECEIVE, "#6d2a66", "#e6b3de"),
    "grads-reduce-scatter": Look(RECEIVE, "#8c4a9e", "#a98bd0"),
    "overlapped-grads-all-reduce": Look(SEND, "#c79ac2", "#7d4a77"),
    "tensor-all-reduce": Look(ACROSS, "#008c95", "#35b8c0"),
    "tensor-all-gather": Look(ACROSS, "#00636b", "#7fd9de"),
    "tensor-reduce-scatter": Look(ACROSS, "#5fb3b3", "#1b7f86"),
    "grad-norm-all-reduce": Look(ACROSS, "#93679e", "#b48cc4"),
    "params-all-gather": Look(ACROSS, "#4d3f9e", "#8f86ff"),
    "islands-all-reduce": Look(ACROSS, "#2f6db5", "#6fa8ea"),
    "forward-compute": Look(COMPUTE, "#0067a5", "#3f9ae0"),
    "backward-compute": Look(COMPUTE, "#cf5a00", "#ef7d22"),
    "backward-input-compute": Look(COMPUTE, "#e06d1c", "#ff9a4d"),
    "backward-weight-compute": Look(COMPUTE, "#7a3a08", "#f9c795"),
    "optimizer": Look(COMPUTE, "#00875f", "#1fae83"),
    "optimizer-copy-to-main-grad": Look(INSIDE, "#b9e3d2", "#0a4736"),
    "optimizer-unscale-and-check-inf": Look(INSIDE, "#d6c27a", "#6f6428"),
    "optimizer-clip-main-grad": Look(INSIDE, "#7fd0b3", "#0c5c44"),
    "optimizer-count-zeros": Look(INSIDE, "#9aa7b5", "#4c5866"),
    "optimizer-inner-step": Look(INSIDE, "#35a583", "#6fd3b4"),
    "optimizer-copy-main-to-model-params": Look(INSIDE, "#5f7d2c", "#b7d67a"),
    "batch-generator": Look(BELOW, "#6f7782", "#98a1ad"),
    "post-process": Look(BELOW, "#a1683a", "#d6a377"),
    "loss-compute": Look(BELOW, "#b3a000", "#e2d44a"),
}
OTHER = Look(BELOW, "#444444", "#cccccc")


def look(name: str) -> Look:
    """Returns how the task of this name is drawn."""
    return TASKS.get(name, OTHER)


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
    `label`: what the figure shows, for those who cannot see it."""
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
    """A whole page, with what draws the figures in its body where there are any. `scripts`: others of `reports/static`,
    after `scheme.js`. `draws`: whether it will have figures, even if it has none now."""
    own = [static(name) for name in ("scheme.js", *scripts)] if scripts else []
    if not draws and 'class="plot' not in body:
        return page(title, body, own)
    drawing = [plotly_script(), *([] if own else [static("scheme.js")]), *map(static, ("theme.js", "figures.js"))]
    return page(title, f"{body}\n{shared()}", [*own, *drawing])


def framed(title: str, crumbs: str, heading: str, parts: Iterable[str], scripts: Sequence[str] = ()) -> str:
    """A page of ready HTML under a heading, with `crumbs` above it, both plain text; `scripts` as of
    `page_with_figures`."""
    head = f'<header><p class="crumbs">{escape(crumbs)}</p><h1>{escape(heading)}</h1></header><main>'
    return page_with_figures(f"{title} – tdpp", "\n".join([head, *parts, "</main>"]), scripts)


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
