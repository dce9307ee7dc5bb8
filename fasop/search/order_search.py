"""The best node order of given sizes, where orders are too many to look at all: by moving nodes.

What is found depends on nothing but the nodes and the sizes, save what is out of reach of any use: so a front of many
sets of nodes has what a search on each of them finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.partition.baselines import start
from fasop.partition.bounds import quick_bound
from fasop.partition.local_search import Worth, bottleneck, shortest
from fasop.search.space.candidates import Candidates, Space, fitting
from fasop.search.space.node_orders import neighbours

BEGUN = 4
"""Orders, those with the lowest bounds, of which partitions are searched before any node is moved."""
TRIED = 8
"""Neighbours of an order, the most promising ones, of which partitions are searched."""


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """Candidates, and what is known of them before any partition is searched."""

    group: Candidates
    balanced: Integers
    """The partitions from `bottleneck`."""
    proved: Floats
    """The bounds."""

    @classmethod
    def of(cls, group: Candidates, floor: float = 0.0, worth: Worth | None = None) -> Bounded:
        """`floor` is a bound that is known of all. Bounds that are of no `worth` need not be the closest."""
        balanced = bottleneck(group.pipelines, group.layers)
        proved = quick_bound(group.pipelines, group.layers, balanced, worth)
        return cls(group=group, balanced=balanced, proved=np.maximum(proved, floor))

    def take(self, columns: Integers) -> Bounded:
        return Bounded(group=self.group.take(columns), balanced=self.balanced[:, columns], proved=self.proved[columns])


@dataclass(frozen=True, kw_only=True)
class BestOrder:
    """A candidate with the best partition that was found."""

    one: Bounded
    partition: Integers
    """[parts, 1]"""
    seconds: float


def search_partitions(
    some: Bounded, begin: Integers | None = None, worth: Worth | None = None
) -> tuple[Integers, Floats]:
    """Partitions, and their seconds: none is slower than `begin`, or than what others find. Where nothing within reach
    is of `worth`, no better ones are looked for."""
    lines, layers = some.group.pipelines, some.group.layers
    begun = start(lines, layers, some.balanced)
    return shortest(lines, layers, begun if begin is None else _faster(some, begun, begin), worth, some.proved)


def best_of_first(groups: Sequence[Bounded], worth: Worth) -> BestOrder | None:
    """The best in the first orders of given sizes; for `worth` see `search_partitions`. None if nothing fits."""
    rows = [
        (bound, number, column) for number, one in enumerate(groups) for column, bound in enumerate(one.proved.tolist())
    ]
    chosen: dict[bytes, tuple[int, int]] = {}
    for _, number, column in sorted(rows):
        if len(chosen) < BEGUN:
            chosen.setdefault(groups[number].group.orders[column].tobytes(), (number, column))
    found = []
    for number, one in enumerate(groups):
        if columns := [column for where, column in chosen.values() if where == number]:
            some = one.take(np.array(columns))
            found.append(_best(some, *search_partitions(some, worth=worth)))
    return min(found, key=lambda one: one.seconds, default=None)


def climb(space: Space, number: int, found: BestOrder, worth: Worth) -> list[tuple[Bounded, Integers, Floats]]:
    """The best order that moving nodes leads to from `found`, of the same sizes: every option in it, with the best
    partitions and their seconds, if these may be of `worth`.
    """
    while (better := _nearby(found, space)) is not None:
        found = better
    some = [Bounded.of(group, worth=worth) for group in space.built(number, space.in_orders(found.one.group.orders))]
    return [(one, *search_partitions(one, np.repeat(found.partition, len(one.group), axis=1), worth)) for one in some]


def _nearby(found: BestOrder, space: Space) -> BestOrder | None:
    """A neighbour with the same option that is faster, if there is one among the most promising."""
    best = found
    for nodes in space.in_orders(neighbours(found.one.group.orders[0])):
        if (group := fitting([found.one.group.training(0)], nodes)) is None:
            continue
        faster = partial(np.greater, found.seconds)
        near = Bounded.of(group, worth=faster)
        near = near.take(np.nonzero(faster(near.proved))[0])
        if len(near.group):
            begin = _faster(near, near.balanced, _carried(found, near.group))
            first = np.argsort(near.group.pipelines.iteration(begin), kind="stable")[:TRIED]
            some = near.take(first)
            better = shortest(some.group.pipelines, some.group.layers, begin[:, first], faster, some.proved)
            best = min(best, _best(some, *better), key=lambda one: one.seconds)
    return best if best.seconds < found.seconds else None


def _best(some: Bounded, partitions: Integers, seconds: Floats) -> BestOrder:
    first = np.array([np.argmin(seconds)])
    return BestOrder(one=some.take(first), partition=partitions[:, first], seconds=float(seconds[first[0]]))


def _faster(some: Bounded, one: Integers, other: Integers) -> Integers:
    """Choose the faster of two partitions of each candidate; `one` fits."""
    lines = some.group.pipelines
    better = lines.fits(other) & (lines.iteration(other) < lines.iteration(one))
    return np.where(better, other, one)


def _carried(found: BestOrder, group: Candidates) -> Integers:
    """The partitions of `group` in which nodes take their layers with them, as nearly as whole layers allow."""
    old, parallel = found.one.group.orders[0], group.training(0).parallel
    stages, width = parallel.pipeline, parallel.tensor_size * parallel.data
    if stages * width % len(old):
        return np.repeat(found.partition, len(group.orders), axis=1)
    moved = np.argsort(old, kind="stable")[np.argsort(np.argsort(group.orders, axis=1, kind="stable"), axis=1)]
    parts = []
    for chunk in found.partition.reshape(-1, stages):
        of_nodes = np.repeat(chunk / width, width).reshape(len(old), -1)
        wanted = of_nodes[moved].reshape(len(moved), stages, width).sum(axis=2).T
        parts.append(_rounded(wanted, int(chunk.sum())))
    return np.concatenate(parts)


def _rounded(wanted: Floats, layers: int) -> Integers:
    """[stages, partitions]: the nearest whole numbers with that sum, by largest remainders."""
    whole = np.floor(wanted + 1e-9).astype(np.int64)
    left = layers - whole.sum(axis=0)
    rank = np.argsort(np.argsort(whole - wanted, axis=0, kind="stable"), axis=0)
    return whole + (rank < left)
