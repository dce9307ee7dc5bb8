"""The critical path of an iteration: what its length is made of, with no waiting in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.path.graph import HUB, Edge, Graph, Kind


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
    keeps nobody waiting.
    """
    times = graph.times(graph.ready_ns)
    comes: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        comes.setdefault(edge.target, []).append(edge)
    latest = max(graph.last, key=lambda rank: times[graph.last[rank]])
    path, origin = _back(graph, times, comes, latest)
    again, period = _back(graph, times, comes, origin)[0], graph.period_ns()
    return min((path, again), key=lambda one: abs(sum(segment.lasts_ns for segment in one) - period))


def _back(
    graph: Graph, times: Sequence[int], comes: Mapping[int, Sequence[Edge]], rank: int
) -> tuple[list[Segment], int]:
    """The path to the end of a rank, and the rank with which it begins."""
    point, found = graph.last[rank], list[Segment]()
    while point in comes:
        # Of ranks that come to a point together, the path stays on its own.
        edge = max(comes[point], key=lambda e: (times[e.source] + e.lasts_ns, graph.rank[e.source] == rank))
        if edge.lasts_ns:
            found.append(
                Segment(
                    start_ns=times[edge.source],
                    end_ns=times[edge.source] + edge.lasts_ns,
                    rank=edge.rank,
                    sender=edge.sender,
                    kind=edge.kind,
                    event=edge.event,
                )
            )
        point = edge.source
        rank = rank if graph.rank[point] == HUB else graph.rank[point]
    return found[::-1], rank
