"""The page with the events of all ranks; `static/` has the scripts that draw them."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from reports.events import Timeline
from reports.pack import event_columns, pack
from reports.page import data, emulated, missing, page, static
from reports.record import Plan, Record
from reports.statistics import Statistics, slowest_first

SCRIPTS = ("plotly-basic.min.js", "unpack.js", "colours.js", "overview.js", "waits.js", "timeline.js")
MOST_RANKS = 64
"""Of more, the page opens with one replica, the slowest."""


def render(record: Record, timeline: Timeline, figures: Statistics) -> str:
    """The page `timeline.html` of a run, as HTML."""
    header = (
        f'{emulated(record.plan.rehearsal)}<header><p class="crumbs">tdpp run</p>'
        f"<h1>{escape(record.name)} <small>timeline</small></h1>"
        '<nav><a href="index.html">← Summary of the run</a></nav></header>'
    )
    title = f"Timeline of {record.name} – tdpp"
    notes = missing([*record.notes, *timeline.notes])
    if not len(timeline.events):
        why = _why_no_events(record.plan)
        return page(title, f'{header}<main>{notes}<p class="none">No events: {why}.</p></main>')
    packed = pack({**event_columns(timeline, len(record.plan.ranks)), **iteration_columns(figures)})
    body = "\n".join(
        [
            header,
            '<main class="wide">',
            static("timeline.html"),
            notes,
            "</main>",
            data("run", _facts(record, timeline, figures, packed.layout)),
            f'<script type="text/plain" id="columns">{packed.text}</script>',
        ]
    )
    return page(title, body, [static(name) for name in SCRIPTS])


def _why_no_events(plan: Plan) -> str:
    if plan.engine == "megatron_lm":
        return "Megatron-LM records none"
    return "none are there yet" if plan.timeline else "profile.timeline=false: the run records none"


def iteration_columns(figures: Statistics) -> dict[str, Any]:
    """Per iteration number, start and length; per rank and iteration the compute share in 1/1000, -1 for none."""
    share = np.nan_to_num(np.rint(figures.compute_share * 1000), nan=-1)
    origin = figures.start_ns.min()
    return {
        "iterations": figures.iterations,
        "iteration_start": figures.start_ns - origin,
        "iteration_length": figures.length_ns,
        "share": share.astype(np.int64).ravel(),
    }


def _facts(
    record: Record, timeline: Timeline, figures: Statistics, layout: list[tuple[str, int, int]]
) -> dict[str, Any]:
    """All that the scripts need beside the columns."""
    replicas = slowest_first(figures, [rank.dp for rank in record.plan.ranks])
    return {
        "layout": layout,
        "names": timeline.names,
        "ranks": [
            {
                "label": rank.label,
                "stage": rank.stage,
                "dp": rank.dp,
                "tp": rank.tp if record.plan.tensor > 1 else None,
                "node": rank.node,
                "host": timeline.hosts.get(rank.rank, ""),
            }
            for rank in record.plan.ranks
        ],
        "chunks": record.plan.chunks,
        "micro_batches": record.plan.micro_batches,
        "uncertainty_ns": timeline.uncertainty_ns,
        "open": figures.middle,
        "replicas": replicas,
        "replica": str(replicas[0]) if len(record.plan.ranks) > MOST_RANKS and len(replicas) > 1 else "",
    }
