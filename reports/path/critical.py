"""The critical path of an iteration: what its length is made of, with no waiting in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.path.graph import HUB, STREAMED, Edge, Graph, Kind


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the path; each begins when the one before it ends."""

    start_ns: int
    end_ns: int
    rank: int
    """Of a message the receiver."""
    sender: int
    """Of a message, else -1."""
    kind: Kind
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
