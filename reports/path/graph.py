"""An iteration as a graph: points in time on the ranks, and how long must lie between them.

A rank's points lie between the things that it does, one after another. An edge says that its target comes at least so
long after its source (`reports/path/making.py` has what edges there are). Waiting has no edge: it follows. A point
comes when the longest path to it ends, with the lengths that were recorded or with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
HUB = -1
"""The rank of a point at which the ranks of a group meet."""


class Kind(IntEnum):
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


COLLECTIVES = (Kind.TENSOR, Kind.GRADIENTS, Kind.EMBEDDING, Kind.WEIGHTS, Kind.NORM)


class Edge(NamedTuple):
    source: int
    target: int
    lasts_ns: int
    kind: Kind
    rank: int
    """Whose time it is: of a message the receiver's; HUB on the way to where a group meets."""
    sender: int
    """The rank that sends a message, else -1."""
    event: int
    """Its number in the timeline's table, or -1."""
    stood_ns: int
    """For how much of it the rank stood still."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Of one iteration."""

    iteration: int
    rank: Sequence[int]
    """(points,)."""
    first: Mapping[int, int]
    """By rank that has events, the point at which it begins."""
    last: Mapping[int, int]
    """By rank, the point at which it is done."""
    ready_ns: Mapping[int, int]
    """By rank, when it began, as recorded."""
    ended_ns: Mapping[int, int]
    """By rank, when it was done, as recorded."""
    edges: Sequence[Edge]
    """Those to a point come before those from it."""

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

    def _column(self, name: str) -> Integers:
        return np.array([getattr(edge, name) for edge in self.edges], np.int64)

    @cached_property
    def _ways(self) -> Sequence[tuple[int, int]]:
        return [(edge.source, edge.target) for edge in self.edges]

    def by_rank(self, lasts_ns: Integers) -> Integers:
        """What edges of these lengths last together, by the number of the rank whose time it is; ns."""
        sums = np.bincount(self.on + 1, weights=lasts_ns, minlength=max(self.last) + 2)
        return np.asarray(np.rint(sums[1:]), np.int64)

    def scaled(self, kind: Kind, factors: NDArray[np.float64]) -> Integers:
        """The lengths with those of a kind multiplied by a factor, which `factors` has by the number of the rank."""
        chosen = self.kind == kind
        lasts = self.lasts_ns.copy()
        lasts[chosen] = np.rint(lasts[chosen] * factors[self.on[chosen]])
        return lasts

    def times(self, ready_ns: Mapping[int, int], lasts_ns: Integers | None = None) -> list[int]:
        """(points,) when each comes, ns, for ranks that begin at `ready_ns`; `lasts_ns` are other lengths of the
        edges."""
        found = [min(ready_ns.values())] * len(self.rank)
        for rank, point in self.first.items():
            found[point] = ready_ns[rank]
        lengths = (self.lasts_ns if lasts_ns is None else lasts_ns).tolist()
        for (source, target), length in zip(self._ways, lengths, strict=True):
            comes = found[source] + length
            if comes > found[target]:
                found[target] = comes
        return found

    def ends(self, ready_ns: Mapping[int, int], lasts_ns: Integers | None = None) -> dict[int, int]:
        """By rank, when it is done."""
        times = self.times(ready_ns, lasts_ns)
        return {rank: times[point] for rank, point in self.last.items()}

    def period_ns(self, lasts_ns: Integers | None = None) -> int:
        """From the end of one such iteration to the end of the next, in which every rank begins when it was done."""
        once = self.ends(self.ready_ns, lasts_ns)
        return max(self.ends(once, lasts_ns).values()) - max(once.values())
