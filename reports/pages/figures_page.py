"""A page of plain figures under some facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from reports.figures.embed import embedded, page_with_figures
from reports.figures.template import figure


def figures_page(title: str, facts: Mapping[str, str], figures: Sequence[Mapping[str, Any]]) -> str:
    """A whole page; each figure has Plotly's `data` and `layout` in plain values, and a title in its layout."""
    cards = "".join(
        f'<div class="card"><dt>{escape(fact)}</dt><dd>{escape(value)}</dd></div>' for fact, value in facts.items()
    )
    drawn = "".join(_drawn(given) for given in figures)
    body = [
        f'<header><p class="crumbs">tdpp data</p><h1>{escape(title)}</h1></header><main>',
        f'<dl class="cards">{cards}</dl>',
        f'<section><h2>Charts</h2><div class="charts">{drawn}</div></section>' if drawn else "",
        "</main>",
    ]
    return page_with_figures(f"{title} – tdpp", "\n".join(body))


def _drawn(given: Mapping[str, Any]) -> str:
    name = given["layout"]["title"]["text"]
    return embedded(figure(title=name, height=320).update_layout(given["layout"]).add_traces(given["data"]), name)
