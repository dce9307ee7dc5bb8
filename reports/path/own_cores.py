"""Iterations as they would be if no rank waited for a CPU core.

Where ranks share cores, with each other or with other processes, any of them waits for one now and then, and its passes
look slow. The kernel counts these waits; without them a rank takes its own time, computing or asleep, and what is wrong
with it is seen beneath the sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reports.path.graph import Graph, Integers, Kind

MUCH = 0.02
"""Of its passes: a rank that waits longer in them, in any iteration, has waits in some of them and not in others."""


def on_own_cores(graphs: Sequence[Graph]) -> list[Graph]:
    """Alike iterations without waits for cores.

    How long a rank waits is known of an iteration, not of a pass. So its own time is divided over its passes as usual,
    by the median of each pass over the iterations. Waits outside of the passes are taken from all else that it does, in
    proportion.
    """
    usual = _usual_passes(graphs)
    return [_without_waits(graph, usual) for graph in graphs]


def _passes(graph: Graph, rank: int) -> Integers:
    """The edges of a rank's passes, in their order."""
    found = np.flatnonzero((graph.kind == Kind.COMPUTE) & (graph.on == rank))
    return found[np.argsort([graph.edges[number].event for number in found.tolist()], kind="stable")]


def _usual_passes(graphs: Sequence[Graph]) -> dict[int, Integers]:
    """By rank that waits MUCH, (its passes,) ns: the median of each; none where iterations have unlike passes."""
    found = {}
    for rank in graphs[0].last:
        rows = [graph.lasts_ns[_passes(graph, rank)] for graph in graphs if rank in graph.last]
        waits = [graph.in_passes_ns.get(rank, 0) for graph in graphs]
        much = any(ns > MUCH * row.sum() for ns, row in zip(waits, rows, strict=False))
        if much and len({len(row) for row in rows}) == 1 and (median := np.median(rows, axis=0)).sum() > 0:
            found[rank] = median
    return found


def _without_waits(graph: Graph, usual: dict[int, Integers]) -> Graph:
    lasts, passes = graph.lasts_ns.astype(np.float64), graph.kind == Kind.COMPUTE
    inside, outside = (graph.by_rank(np.where(chosen, graph.lasts_ns, 0)) for chosen in (passes, ~passes))
    for rank in graph.last:
        own = _passes(graph, rank)
        left = max(inside[rank] - graph.in_passes_ns.get(rank, 0), 0)
        if rank in usual and len(own) == len(usual[rank]):
            lasts[own] = left * usual[rank] / usual[rank].sum()
        else:
            lasts[own] *= left / max(inside[rank], 1)
        rest = ~passes & (graph.on == rank)
        lasts[rest] *= max(1 - graph.outside_ns.get(rank, 0) / max(outside[rank], 1), 0.0)
    edges = [edge._replace(lasts_ns=round(ns)) for edge, ns in zip(graph.edges, lasts.tolist(), strict=True)]
    return replace(graph, edges=edges, in_passes_ns={}, outside_ns={})
