"""The critical path of an iteration: what its length is made of, with no waiting in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from megatron_ext.contract.plan import Plan
from reports.path.graph import COLLECTIVES, HUB, STREAMED, Edge, EdgeKind, Graph, Integers


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the path; each begins when the one before it ends."""

    start_ns: int
    end_ns: int
    rank: int
    """The receiver of a message, else the rank whose time it is."""
    sender: int
    """The sender of a message, else -1."""
    kind: EdgeKind
    event: int
    """Its number in the timeline's table, or -1."""

    @property
    def lasts_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(graph: Graph) -> list[Segment]:
    """The segments of the path, first to last; together they are the iteration.

    It is followed back from the latest end, or from the end on the rank with which that path begins, where this one is
    what an iteration adds to the run: what another rank still has to do then, while this one is at the next iteration,
    keeps nobody waiting. Where iterations go on beside each other, it is followed over several of them, for as long as
    an iteration takes.
    """
    if graph.streams:
        return _streamed(graph)
    times = graph.times(graph.ready_ns)
    comes: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        comes.setdefault(edge.target, []).append(edge)
    latest = max(graph.last, key=lambda rank: times[graph.last[rank]])
    path, origin = _back(graph, times, comes, latest)
    again, period = _back(graph, times, comes, origin)[0], graph.period_ns()
    return min((path, again), key=lambda one: abs(sum(segment.lasts_ns for segment in one) - period))


def _streamed(graph: Graph) -> list[Segment]:
    """Back from the end of the last of some iterations."""
    every = graph.one_after_another(STREAMED)
    comes: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        comes.setdefault(edge.target, []).append(edge)
    first = {point: rank for rank, point in graph.first.items()}
    at = len(every) - 1
    rank = max(graph.last, key=lambda rank: every[at][graph.last[rank]])
    point, found = graph.last[rank], list[Segment]()
    begin = every[at][point] - graph.period_ns()
    while every[at][point] > begin:
        ways = [edge for edge in comes.get(point, ()) if edge.back <= at]
        came = [every[at - edge.back][edge.source] + edge.lasts_ns for edge in ways]
        if point in first and (not came or max(came) < every[at][point]):
            if not at:
                break
            at, point = at - 1, graph.last[first[point]]
            continue
        edge = ways[came.index(max(came))]
        start = every[at - edge.back][edge.source]
        if edge.lasts_ns:
            found.append(_segment(edge, max(start, begin), start + edge.lasts_ns))
        at, point = at - edge.back, edge.source
    return found[::-1]


def _segment(edge: Edge, start_ns: int, end_ns: int) -> Segment:
    return Segment(
        start_ns=start_ns, end_ns=end_ns, rank=edge.rank, sender=edge.sender, kind=edge.kind, event=edge.event
    )


def _back(
    graph: Graph, times: Sequence[int], comes: Mapping[int, Sequence[Edge]], rank: int
) -> tuple[list[Segment], int]:
    """The path to the end of a rank, and the rank with which it begins."""
    point, found = graph.last[rank], list[Segment]()
    while point in comes:
        # Of ranks that come to a point together, the path stays on its own.
        edge = max(comes[point], key=lambda e: (times[e.source] + e.lasts_ns, graph.rank[e.source] == rank))
        if edge.lasts_ns:
            found.append(_segment(edge, times[edge.source], times[edge.source] + edge.lasts_ns))
        point = edge.source
        rank = rank if graph.rank[point] == HUB else graph.rank[point]
    return found[::-1], rank


BUSY = (EdgeKind.COMPUTE, EdgeKind.OPTIMIZER)
LET_IN: Sequence[Sequence[EdgeKind]] = ((), (), (EdgeKind.MESSAGE,), COLLECTIVES, (EdgeKind.DATA,), (EdgeKind.HOST,))
IDLE = ("pipeline order", "slow neighbour", "message", "collective", "data", "host")


def idle_frame(graph: Graph, plan: Plan) -> pd.DataFrame:
    """A row for each rank that has events, in ms: `compute`, `optimizer` and the causes of IDLE, which together are an
    iteration; `under_way`, for how long its messages and collectives were, and `hidden`, for how much of that it went
    on; beside them its `stage` and `node`."""
    ranks = sorted(graph.last)
    busy = {kind: graph.by_rank(np.where(graph.kind == kind, graph.lasts_ns, 0))[ranks] for kind in BUSY}
    lasts = np.where(np.isin(graph.kind, BUSY), graph.lasts_ns, 0)
    equal = _equal(graph)
    together = busy[EdgeKind.COMPUTE] + busy[EdgeKind.OPTIMIZER]
    idle = [graph.period_ns(equal) - graph.by_rank(equal)[ranks]]
    for kinds in LET_IN[1:]:
        lasts = np.where(np.isin(graph.kind, kinds), graph.lasts_ns, lasts)
        idle.append(graph.period_ns(lasts) - together)
    grown = np.maximum(np.minimum.accumulate(np.array(idle)[::-1], axis=0)[::-1], 0)
    causes = np.diff(grown, axis=0, prepend=0)
    places = {place.rank: place for place in plan.ranks}
    under_way, hidden = _overlap(graph, ranks)
    frame = {
        "rank": ranks,
        "stage": [places[rank].stage for rank in ranks],
        "node": [plan.node_of(rank) for rank in ranks],
        "compute": busy[EdgeKind.COMPUTE] / 1e6,
        "optimizer": busy[EdgeKind.OPTIMIZER] / 1e6,
        **{cause: added / 1e6 for cause, added in zip(IDLE, causes, strict=True)},
        "under_way": under_way / 1e6,
        "hidden": hidden / 1e6,
    }
    return pd.DataFrame(frame).set_index("rank")


def _equal(graph: Graph) -> Integers:
    """The lengths of passes and updates, were those of each rank as long together as of the mean of all."""
    lasts = np.zeros(len(graph.lasts_ns), np.int64)
    for kind in BUSY:
        sums = graph.sums(kind)
        mean = float(np.mean([sums[rank] for rank in sorted(sums)]))
        scaled = graph.scaled(kind, {rank: mean / max(ns, 1) for rank, ns in sums.items()})
        lasts = np.where(graph.kind == kind, scaled, lasts)
    return lasts


def _overlap(graph: Graph, ranks: Sequence[int]) -> tuple[Integers, Integers]:
    """Returns by rank how long its messages and collectives took, and for how much of that it kept computing, ns."""
    apart = {rank: [0, 0] for rank in ranks}
    for edge in graph.edges:
        if edge.rank in apart and ((edge.kind == EdgeKind.MESSAGE and edge.sender >= 0) or edge.kind in COLLECTIVES):
            apart[edge.rank][0] += edge.lasts_ns
            apart[edge.rank][1] += max(edge.lasts_ns - edge.stood_ns, 0)
    both = np.array([apart[rank] for rank in ranks], np.int64)
    return both[:, 0], both[:, 1]
