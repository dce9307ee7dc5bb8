"""Figures in pages."""

from __future__ import annotations

import json
import re

import pandas as pd
from plotly import graph_objects as go

from reports.figures.chart import lines
from reports.figures.embed import embedded, figure


def parts(figure: go.Figure) -> tuple[str, dict]:
    """The caption of a figure in a page, and the layout that Plotly draws."""
    html = embedded(figure, "what it shows")
    caption = re.search("<figcaption>(.*?)</figcaption>", html)
    text = re.search('<script type="application/json">(.*?)</script>', html)[1]
    return caption[1] if caption else "", json.loads(text)["layout"]


def test_a_title_stands_above_its_figure_where_no_legend_can_reach_it():
    made = lines([pd.Series([1.0, 2.0], name=f"stage {n}") for n in range(9)], x_title="x", title="Loss & <b>more</b>")
    before = made.layout.height
    caption, layout = parts(made)
    assert caption == "Loss &amp; &lt;b&gt;more&lt;/b&gt;"
    assert "title" not in layout
    assert layout["height"] < before, "the caption takes the place that the title had"
    assert made.layout.title.text, "the figure of a notebook keeps its title"


def test_a_figure_without_a_title_has_no_caption_and_keeps_its_height():
    caption, layout = parts(figure(height=320))
    assert (caption, layout["height"]) == ("", 320)
