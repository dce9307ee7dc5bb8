"""The page of a divided graph: its stages, the graph with its cuts, and the times of its operators."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from conf.visible import plural
from fasop.graphs.division import Division
from fasop.graphs.options import Sync
from fasop.graphs.table import bound, summary, table, takes
from reports.figures.embed import embedded, page_with_figures
from reports.figures.operators import drawn_graph, drawn_times
from reports.figures.page import bullets, copyable
from reports.figures.page import table as html_table


def render(command: str, division: Division, notes: Sequence[str] = ()) -> str:
    """The page, as HTML.

    Args:
        command: that found the stages.
        notes: what a reader must know of the profile, in words.
    """
    head, rows = table(division)
    graph, times = "Operators by stage, and the edges between them", "Forward and backward passes of the operators"
    body = [
        '<header><p class="crumbs">tdpp search</p>'
        f"<h1>{plural(len(division.stages), 'stage')}: {escape(division.replicas)}</h1>"
        "</header><main>",
        f'<section class="verdict good"><p class="reason">{escape(summary(division))}</p>{_paragraph(bound(division))}'
        f"{bullets([*division.notes, *notes])}{copyable(command)}</section>",
        f"<section><h2>Stages</h2>{html_table(head, rows)}{_shares(division)}</section>",
        f"<section><h2>The graph</h2>{embedded(drawn_graph(division), graph)}</section>",
        f"<section><h2>Times</h2>{embedded(drawn_times(division), times)}{_operators(division)}</section>",
        "</main>",
    ]
    return page_with_figures("Stages – tdpp", "\n".join(body))


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def _shares(division: Division) -> str:
    head, rows = takes(division)
    if not rows:
        return ""
    how = "the longer of the two" if division.sync is Sync.max else "compute and all-reduce"
    said = (
        f"Milliseconds of a stage per mini-batch, over all its replicas. &ldquo;Both&rdquo; is {how}; in and out are "
        "the busiest links before and after it, forward and back."
    )
    return f"<p>{said}</p>{html_table(head, rows)}"


def _operators(division: Division) -> str:
    """What the figures show of each, for those who do not point at them."""
    head = ("operator", "stage", "forward, ms", "backward, ms", "result, MB", "parameters, MB", "takes")
    rows = [
        [
            node.name,
            "none" if node.stage is None else str(node.stage),
            *(f"{ms:,.3f}" for ms in (node.forward_ms, node.backward_ms)),
            *(f"{size / 1e6:,.2f}" for size in (node.activation_bytes, node.parameter_bytes)),
            ", ".join(node.inputs),
        ]
        for node in division.graph.topological
        if any((node.forward_ms, node.backward_ms, node.activation_bytes, node.parameter_bytes))  # no bare input
    ]
    return f"<details><summary>All operators</summary>{html_table(head, rows)}</details>"
