"""A page of plain figures under some facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from reports.figures.page import data, page, static, table

DRAW = """
"use strict";
const style = getComputedStyle(document.body);
const options = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };
const common = {
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { color: style.color, family: style.fontFamily }, height: 420,
};
JSON.parse(document.getElementById("figures").textContent).forEach((figure, number) =>
  Plotly.newPlot(`figure-${number}`, figure.data, { ...common, ...figure.layout }, options));
"""


def figures_page(title: str, facts: Mapping[str, str], figures: Sequence[Mapping[str, Any]]) -> str:
    """A whole page; each figure has Plotly's `data` and `layout` in plain values."""
    body = "\n".join(
        [
            f"<header><h1>{escape(title)}</h1></header><main>",
            table(["", ""], facts.items()),
            *(f'<div id="figure-{number}"></div>' for number in range(len(figures))),
            "</main>",
            data("figures", figures),
        ]
    )
    return page(f"{title} – tdpp", body, [static("plotly-basic.min.js"), DRAW])
