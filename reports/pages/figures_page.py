"""A page of plain figures under some facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from reports.figures.embed import embedded, page_with_figures
from reports.figures.page import table
from reports.figures.template import figure


def figures_page(title: str, facts: Mapping[str, str], figures: Sequence[Mapping[str, Any]]) -> str:
    """A whole page; each figure has Plotly's `data` and `layout` in plain values, and a title in its layout."""
    body = [
        f'<header><p class="crumbs">tdpp data</p><h1>{escape(title)}</h1></header><main>',
        f"<section><h2>What it holds</h2>{table(['fact', 'value'], facts.items())}</section>",
    ]
    for given in figures:
        name = given["layout"]["title"]["text"]
        made = figure(title=name, height=420).update_layout(given["layout"]).add_traces(given["data"])
        body.append(f"<section>{embedded(made, name)}</section>")
    return page_with_figures(f"{title} – tdpp", "\n".join([*body, "</main>"]))
