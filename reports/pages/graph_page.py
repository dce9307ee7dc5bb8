"""The page of a divided graph: its stages, the graph with its cuts, and the times of its operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from plotly import graph_objects as go

from conf.visible import plural
from fasop.graphs.division import StageDivision, Sync, bound, summary, table, takes
from fasop.graphs.graph import Operator
from reports.figures.embed import BORDER, SERIES, SOFT, embedded, figure, framed
from reports.figures.page import bullets, copyable
from reports.figures.page import table as html_table


def render(command: str, division: StageDivision, notes: Sequence[str] = ()) -> str:
    """The page, as HTML. `command`: that found the stages. `notes`: what a reader must know of the profile, in
    words."""
    head, rows = table(division)
    graph, times = "Operators by stage, and the edges between them", "Forward and backward passes of the operators"
    proved = f"<p>{escape(text)}</p>" if (text := bound(division)) else ""
    parts = [
        f'<section class="verdict good"><p class="reason">{escape(summary(division))}</p>{proved}'
        f"{bullets([*division.notes, *notes])}{copyable(command)}</section>",
        f"<section><h2>Stages</h2>{html_table(head, rows)}{_shares(division)}</section>",
        f"<section><h2>The graph</h2>{embedded(drawn_graph(division), graph)}</section>",
        f"<section><h2>Times</h2>{embedded(drawn_times(division), times)}{_operators(division)}</section>",
    ]
    return framed("Stages", "tdpp search", f"{plural(len(division.stages), 'stage')}: {division.replicas}", parts)


def _shares(division: StageDivision) -> str:
    head, rows = takes(division)
    if not rows:
        return ""
    how = "the longer of the two" if division.sync is Sync.max else "compute and all-reduce"
    message = (
        f"Milliseconds of a stage per mini-batch, over all its replicas. &ldquo;Both&rdquo; is {how}; in and out are "
        "the busiest links before and after it, forward and back."
    )
    return f"<p>{message}</p>{html_table(head, rows)}"


def _operators(division: StageDivision) -> str:
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


LEAST, MOST = 6, 30
"""Pixels across an operator that takes no time, and the one that takes the most."""


def drawn_graph(division: StageDivision) -> go.Figure:
    """Each operator right of all that it depends on, as large as it is slow and in its stage's colour; edges that a cut
    crosses are dashed."""
    graph = division.graph
    depth: dict[str, int] = {}
    for node in graph.topological:
        depth[node.name] = 1 + max((depth[name] for name in node.inputs), default=-1)
    across: dict[str, int] = {}
    used: dict[int, int] = {}
    for node in graph.topological:
        across[node.name] = used.get(depth[node.name], 0)
        used[depth[node.name]] = across[node.name] + 1
    legend = 22 * (2 + len(_by_stage(division)))  # a line each on a narrow screen, of which it may have a half
    made = figure(height=min(900, 160 + legend + max(legend, 28 * max(used.values()))), hovermode="closest")
    made.update_layout(margin_t=70)  # three lines of the legend, which is not drawn over the graph when widths change
    for cut, dash, width in ((False, "solid", 1.0), (True, "dash", 1.8)):
        x: list[float | None] = []
        y: list[float | None] = []
        for node in graph.nodes:
            for name in node.inputs:
                if (graph.by_name[name].stage != node.stage) is cut:
                    x += [depth[name], depth[node.name], None]
                    y += [across[name], across[node.name], None]
        if x:
            line = {"color": SOFT if cut else BORDER, "width": width, "dash": dash}
            name = "crosses a cut" if cut else "within a stage"
            made.add_scatter(x=x, y=y, mode="lines", line=line, name=name, hoverinfo="skip")
    slowest = max(node.compute_ms for node in graph.nodes) or 1.0
    for stage, nodes in _by_stage(division).items():
        made.add_scatter(
            x=[depth[node.name] for node in nodes],
            y=[across[node.name] for node in nodes],
            mode="markers",
            marker={
                "size": [LEAST + (MOST - LEAST) * (node.compute_ms / slowest) ** 0.5 for node in nodes],
                "color": BORDER if stage is None else SERIES[stage % len(SERIES)],
            },
            name=_named(stage),
            text=[_tip(node) for node in nodes],
            hovertemplate="%{text}<extra></extra>",
        )
    made.update_xaxes(title_text="longest path of operators before it", showgrid=False)
    made.update_yaxes(visible=False, autorange="reversed")
    return made


def drawn_times(division: StageDivision) -> go.Figure:
    """Forward and backward pass of every operator in their order, and where stages end."""
    nodes = division.graph.topological
    made = figure(height=320, barmode="stack")
    for name, values, colour in (
        ("forward", [node.forward_ms for node in nodes], SERIES[0]),
        ("backward", [node.backward_ms for node in nodes], SERIES[1]),
    ):
        made.add_bar(
            x=list(range(len(nodes))),
            y=values,
            name=name,
            marker={"color": colour},
            text=[_tip(node) for node in nodes],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )
    for number, (node, other) in enumerate(pairwise(nodes)):
        if node.stage != other.stage:
            made.add_vline(x=number + 0.5, line={"color": SOFT, "dash": "dash", "width": 1.2})
    made.update_xaxes(title_text="operator")
    made.update_yaxes(title_text="ms per mini-batch", rangemode="tozero")
    return made


def _by_stage(division: StageDivision) -> Mapping[int | None, list[Operator]]:
    stages = sorted({node.stage for node in division.graph.nodes}, key=lambda one: (one is None, one))
    return {stage: [node for node in division.graph.nodes if node.stage == stage] for stage in stages}


def _named(stage: int | None) -> str:
    return "no stage" if stage is None else f"stage {stage}"


def _tip(node: Operator) -> str:
    texts = [
        f"{node.name}: {node.description[:80]}",
        f"{_named(node.stage)}",
        f"forward {node.forward_ms:,.3f} ms, backward {node.backward_ms:,.3f} ms",
        f"result {node.activation_bytes / 1e6:,.2f} MB, parameters {node.parameter_bytes / 1e6:,.2f} MB",
    ]
    return "<br>".join(map(escape, texts))
