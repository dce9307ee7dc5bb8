"""How every figure looks: one Plotly template, in the colours of the pages' style sheet by daylight.

`static/figures.js` puts the colours of the dark scheme in their place where a reader's system asks for it.
"""

from __future__ import annotations

from typing import Any

from plotly import graph_objects as go

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
"""By the name of the variable in `static/page.css` that has the same by day, and its counterpart by night."""
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
