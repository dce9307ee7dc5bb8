"""An iteration as a graph: points in time on the ranks, and how long must lie between them.

A rank's points lie between the things that it does, one after another. An edge says that its target comes at least so
long after its source (`reports/path/graph_of_events.py` has what edges there are). Waiting has no edge: it follows.
A point comes when the longest path to it ends, with the lengths that were recorded or with others.

Where nothing is flushed, a message may be taken in a later iteration than it was sent in. Its edge then comes from the
same point of an earlier iteration, so that many of them, one after another, are one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
HUB = -1
"""The rank of a point at which the ranks of a group meet."""
STREAMED = 12
"""Iterations that are replayed where one goes on beside the next: as many as a pipeline needs to settle, and some."""


class EdgeKind(IntEnum):
    """What the time of an edge goes into."""

    COMPUTE = 0
    MESSAGE = 1
    TENSOR = 2
    GRADIENTS = 3
    EMBEDDING = 4
    WEIGHTS = 5
    NORM = 6
    OPTIMIZER = 7
    DATA = 8
    HOST = 9


COLLECTIVES = (EdgeKind.TENSOR, EdgeKind.GRADIENTS, EdgeKind.EMBEDDING, EdgeKind.WEIGHTS, EdgeKind.NORM)


class Edge(NamedTuple):
    source: int
    target: int
    lasts_ns: int
    kind: EdgeKind
    rank: int
    """Whose time it is: of a message the receiver's; HUB on the way to where a group meets."""
    sender: int
    """The rank that sends a message, else -1."""
    event: int
    """Its number in the timeline's table, or -1."""
    stood_ns: int
    """For how much of it the rank stood still."""
    back: int = 0
    """How many iterations before that of the target the source is."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The points and edges of one iteration."""

    iteration: int
    rank: Sequence[int]
    """(points,)."""
    first: Mapping[int, int]
    """The point at which each rank that has events begins."""
    last: Mapping[int, int]
    """The point at which each rank is done."""
    ready_ns: Mapping[int, int]
    """When each rank began, as recorded."""
    ended_ns: Mapping[int, int]
    """When each rank was done, as recorded."""
    edges: Sequence[Edge]
    """Those to a point come before those from it in the same iteration."""
    in_passes_ns: Mapping[int, int]
    """How long each rank waited for a CPU core in its passes, as far as that is known."""
    outside_ns: Mapping[int, int]
    """The same of the waits that were not in its passes."""

    @cached_property
    def lasts_ns(self) -> Integers:
        """(edges,)."""
        return self._column("lasts_ns")

    @cached_property
    def kind(self) -> Integers:
        """(edges,) of Kind."""
        return self._column("kind")

    @cached_property
    def on(self) -> Integers:
        """(edges,) the rank whose time it is."""
        return self._column("rank")

    @cached_property
    def sender(self) -> Integers:
        """(edges,)."""
        return self._column("sender")

    @cached_property
    def stood_ns(self) -> Integers:
        """(edges,)."""
        return self._column("stood_ns")

    def _column(self, name: str) -> Integers:
        return np.array([getattr(edge, name) for edge in self.edges], np.int64)

    @cached_property
    def now_ns(self) -> int:
        """`period_ns` as it was."""
        return self.period_ns()

    @cached_property
    def streams(self) -> bool:
        """Whether an iteration takes what an earlier one sent."""
        return any(edge.back for edge in self.edges)

    @cached_property
    def _ways(self) -> Sequence[tuple[int, int, int]]:
        return [(edge.source, edge.target, edge.back) for edge in self.edges]

    def by_rank(self, lasts_ns: Integers) -> Integers:
        """What edges of these lengths last together, by the number of the rank whose time it is; ns."""
        sums = np.bincount(self.on + 1, weights=lasts_ns, minlength=max(self.last) + 2)
        return np.asarray(np.rint(sums[1:]), np.int64)

    def sums(self, kind: EdgeKind) -> dict[int, int]:
        """Returns for each rank that has events how long its edges of a kind last together, ns."""
        sums = self.by_rank(np.where(self.kind == kind, self.lasts_ns, 0))
        return {rank: int(sums[rank]) for rank in self.last}

    def scaled(self, kind: EdgeKind, factors: Mapping[int, float]) -> Integers:
        """The lengths with those of a kind multiplied by the factor of their rank, where it has one."""
        by_rank = np.ones(max(self.last) + 1)
        for rank, factor in factors.items():
            by_rank[rank] = factor
        chosen, lasts = self.kind == kind, self.lasts_ns.copy()
        lasts[chosen] = np.rint(lasts[chosen] * by_rank[self.on[chosen]])
        return lasts

    def times(
        self, ready_ns: Mapping[int, int], lasts_ns: Integers | None = None, before: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """(points,) when each comes, ns, for ranks that begin at `ready_ns`. `lasts_ns`: other lengths of the edges.
        `before`: the times of the iterations before this one; what others sent is taken to have come."""
        found = [min(ready_ns.values())] * len(self.rank)
        for rank, point in self.first.items():
            found[point] = ready_ns[rank]
        lengths = (self.lasts_ns if lasts_ns is None else lasts_ns).tolist()
        for (source, target, back), length in zip(self._ways, lengths, strict=True):
            if back > len(before):
                continue
            comes = (before[-back][source] if back else found[source]) + length
            if comes > found[target]:
                found[target] = comes
        return found

    def ends(self, ready_ns: Mapping[int, int], lasts_ns: Integers | None = None) -> dict[int, int]:
        """Returns when each rank is done."""
        return self._ends(self.times(ready_ns, lasts_ns))

    def _ends(self, times: Sequence[int]) -> dict[int, int]:
        return {rank: times[point] for rank, point in self.last.items()}

    def one_after_another(self, count: int, lasts_ns: Integers | None = None) -> list[list[int]]:
        """The times of so many such iterations, in each of which every rank begins when it was done with the last."""
        ready, found = self.ready_ns, list[list[int]]()
        for _ in range(count):
            found.append(self.times(ready, lasts_ns, found))
            ready = self._ends(found[-1])
        return found

    def period_ns(self, lasts_ns: Integers | None = None) -> int:
        """From the end of one such iteration to the end of the next."""
        count = STREAMED if self.streams else 2
        ends = [max(self._ends(times).values()) for times in self.one_after_another(count, lasts_ns)]
        return (ends[-1] - ends[count // 2 - 1]) // (count - count // 2)


def median_by_rank(graphs: Sequence[Mapping[int, int]]) -> dict[int, float]:
    """Returns the median of each rank over several iterations; a rank counts as 0 where it has no figure."""
    ranks = sorted({rank for one in graphs for rank in one})
    return {rank: float(np.median([one.get(rank, 0) for one in graphs])) for rank in ranks}


MUCH = 0.02
"""A rank that waits longer than this part of its passes, in any iteration, has waits in some of them alone."""


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
    found = np.flatnonzero((graph.kind == EdgeKind.COMPUTE) & (graph.on == rank))
    return found[np.argsort([graph.edges[number].event for number in found.tolist()], kind="stable")]


def _usual_passes(graphs: Sequence[Graph]) -> dict[int, Integers]:
    """Returns by rank that waits MUCH the median ns of each of its passes; none where iterations have unlike passes."""
    found = {}
    for rank in graphs[0].last:
        rows = [graph.lasts_ns[_passes(graph, rank)] for graph in graphs if rank in graph.last]
        waits = [graph.in_passes_ns.get(rank, 0) for graph in graphs]
        much = any(ns > MUCH * row.sum() for ns, row in zip(waits, rows, strict=False))
        if much and len({len(row) for row in rows}) == 1 and (median := np.median(rows, axis=0)).sum() > 0:
            found[rank] = median
    return found


def _without_waits(graph: Graph, usual: dict[int, Integers]) -> Graph:
    lasts, passes = graph.lasts_ns.astype(np.float64), graph.kind == EdgeKind.COMPUTE
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
