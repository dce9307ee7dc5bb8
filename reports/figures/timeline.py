"""The timeline of one iteration as a Plotly figure: a row for each rank, a bar for each event."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from reports.figures.tasks import COMPUTE, Place, look
from reports.figures.template import figure

ROW = 36
"""Pixels."""
PALE = "rgba(255, 255, 255, 0.8)"
"""Over the part of a bar that is waiting for another rank."""


def _rows(**layout: Any) -> go.Figure:
    """An empty figure for a row for each rank, from above to below."""
    return figure(barmode="overlay", bargap=0, **layout).update_yaxes(showgrid=False)


def timeline(events: pd.DataFrame, labels: Mapping[int, str], title: str) -> go.Figure:
    """The events of an iteration (`reports.facts.frames.waiting_frame`), in ms from the first of them.

    Args:
        labels: of the ranks, from above to below.
    """
    rows = {rank: row for row, rank in enumerate(labels)}
    made = _rows(title=escape(title), height=90 + ROW * len(rows))
    made.update_xaxes(title_text="ms", rangemode="tozero")
    made.update_yaxes(tickvals=list(rows.values()), ticktext=[escape(label) for label in labels.values()])
    made.update_yaxes(range=[len(rows) - 0.5, -0.5])
    shown = events.assign(
        row=events["rank"].map(rows).astype("float64"),
        start_ms=(events["start_ns"] - events["start_ns"].min()) / 1e6,
        lasts_ms=(events["end_ns"] - events["start_ns"]) / 1e6,
        waits_ms=events["waiting_ns"] / 1e6,
    ).dropna(subset=["row"])
    for task, bars in shown.groupby("task", observed=True, sort=True):
        one = look(str(task))
        made.add_bar(
            name=escape(str(task)),
            marker={"color": one.light, "line": {"width": 0}},
            hovertext=_hover(bars),
            hoverinfo="text",
            **_placed(bars, bars["lasts_ms"], one.place),
        )
    waits = shown[shown["waits_ms"] > 0]
    if len(waits):
        made.add_bar(
            name="waiting",
            marker={"color": PALE, "line": {"width": 0}},
            hoverinfo="skip",
            showlegend=False,
            **_placed(waits, waits["waits_ms"], COMPUTE),
        )
    return made


def _placed(bars: pd.DataFrame, lasts_ms: pd.Series, place: Place) -> dict[str, object]:
    """Where bars lie; those of several tasks each in the place of its own."""
    places = [look(str(task)).place for task in bars["task"]]
    places = [place if one.lane == place.lane else one for one in places]
    return {
        "orientation": "h",
        "base": bars["start_ms"].tolist(),
        "x": lasts_ms.tolist(),
        "y": [row + (one.top + one.bottom) / 2 for row, one in zip(bars["row"], places, strict=True)],
        "width": [one.bottom - one.top for one in places],
    }


def _hover(bars: pd.DataFrame) -> list[str]:
    texts = []
    for bar in bars.itertuples():
        parts = [f"<b>{escape(str(bar.task))}</b>", f"rank {bar.rank} · stage {bar.stage} · {escape(str(bar.node))}"]
        parts += [f"micro-batch {bar.micro_batch}, chunk {bar.chunk}"] if pd.notna(bar.micro_batch) else []
        parts += [f"peer rank {bar.peer}"] if pd.notna(bar.peer) else []
        parts += [f"start {bar.start_ms:,.3f} ms, duration {bar.lasts_ms:,.3f} ms"]
        parts += [f"of which {bar.waits_ms:,.3f} ms waiting"] if bar.waits_ms > 0 else []
        texts.append("<br>".join(parts))
    return texts
