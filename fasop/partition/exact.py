"""The partition of one pipeline with the shortest iteration, or how much shorter one could be at most: branch and cut.

An iteration takes as long as its longest path of waits. Every path takes a time that is linear in the layers, so each
one gives a lower bound of all partitions, a cut (`Pipelines.longest`). A linear program over many of them bounds all
partitions of a box, and boxes are halved where its solution is not a partition (Kelley 1960, Land and Doig 1960, Gomory
1960). With several chunks to a stage, boxes are first halved by the layers of whole stages: one more lengthens the
iteration by all its passes, and one that goes from chunk to chunk hardly does. What is done is counted in boxes, not
seconds, so that the same search says the same everywhere.

HiGHS 1.15 was tried in its place (highspy, 12 MiB installed): a mixed-integer program over the same cuts, of at most
200 nodes, solved again with a cut at each solution. Of the first plans of 13 searches, of 4 to 48 parts, both prove 7.
HiGHS proves an eighth and a tighter bound of a ninth; of the four others its bounds are looser. All 13 take it 127 CPU
seconds, and 16 here.

Where layers differ, paths and mixed partitions bound an iteration: of any mean of paths the least over all partitions
of possible stages (`fasop.partition.possible_stages`) is found exactly, and no partition takes less. The mean for which
that is largest comes from a linear program over the paths and the partitions that are known, of which it mixes some;
this mixture, and the partition that is best for the mean of paths, give further paths (Dantzig and Wolfe 1960). A path
knows the messages on it as well as its passes, so that longer ones over some cuts count.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.partition.heterogeneous_layers import of_first_layers
from fasop.partition.least_sum import least_sum_of_steps
from fasop.partition.linear_program import BoxNode, MinimaxLP, Solved
from fasop.partition.possible_stages import PossibleStages
from fasop.simulation.linear import Layers
from fasop.simulation.pipelines import FULL, Pipelines

EXACT = 1e-6
"""Partitions that differ by less, in proportion, are as good as each other."""
NEAR = 1e-3
"""A solution whose longest path is known but for this needs no further cut."""
CUTS = (40, 2, 3)
"""How often paths are cut off at the solutions of the first box: at first, and after what is not a partition was
excluded; and at those of every other box."""
INWARD = (0.0, 0.3, 0.6, 0.9)
"""Where: so far on the way from the solution to the division whose longest path is the shortest so far. A solution lies
far out, where paths say little of what is near the best one (in-out separation, Ben-Ameur and Neto 2007)."""
EXCLUDED = 10
"""How often that is."""
TRIED, STEPS = 8, 20
"""Amounts at which a box is halved on trial, and steps to a trial's bound, which go on where the half is looked at."""
ROUNDED = 4
"""After so many boxes the partition nearest to a box's solution is simulated."""
WHOLE = 1e-6
"""What an amount may differ from a number of layers."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """`seconds` is what the partition takes, `bound` what every partition takes at least, but for `EXACT`."""

    partition: Integers
    """[parts, 1]"""
    seconds: float
    bound: float
    boxes: int
    """How many were looked at."""


def proved(
    one: Pipelines, layers: int, begin: Integers, boxes: int, enough: float = np.inf, least: float = 0.0
) -> Proof:
    """The best partition, from `begin` [parts, 1], which fits; and its bound, the best that so many boxes prove, at
    most `enough`. None takes less than `least`, if that is known."""
    if one.order is not None:
        return proved_of_heterogeneous_layers(one, begin, least, enough)
    return proved_of_paths(_PipelinePaths(one, layers), layers, begin, boxes, enough)


def proved_of_paths(one: Paths, layers: int, begin: Integers, boxes: int, enough: float = np.inf) -> Proof:
    """Do as `proved`, where all layers are alike, of whatever has such paths."""
    search = _Search(one, layers, begin, enough)
    bound, looked_at = search.run(boxes)
    bound = min(bound, search.seconds, enough)
    return Proof(partition=search.best, seconds=search.seconds, bound=bound, boxes=looked_at)


class Paths(Protocol):
    """What is to be cut into parts, and its longest paths of waits."""

    parts: int
    capacity: Integers
    """[stages]: the layers that each may have, in all its parts."""

    def seconds(self, partition: Integers) -> float:
        """Return what a partition [parts, 1] that fits takes."""
        ...

    def longest(self, divisions: Layers) -> tuple[Floats, Floats]:
        """Return the longest paths with divisions [parts, divisions], not into whole layers alone: [parts, paths]
        seconds that each gains with a layer of a part, and [paths] what it takes beside layers. No partition takes less
        than a path does with it."""
        ...

    def broken(self, partition: Integers) -> tuple[Floats, Floats] | None:
        """Return rows [rows, parts] and what they may be with amounts at most, of which a partition [parts] breaks one:
        none where it does not fit all the same; None if it fits."""
        ...


class _PipelinePaths:
    """Those of a pipeline, whose backward passes may hide sums."""

    def __init__(self, one: Pipelines, layers: int) -> None:
        self._one, self._paths = one, one.unhidden(layers)
        self.parts, self.capacity = one.parts_count, one.capacity[:, 0]

    def seconds(self, partition: Integers) -> float:
        return float(self._one.iteration(partition)[0])

    def longest(self, divisions: Layers) -> tuple[Floats, Floats]:
        slopes, seconds = self._paths.take(np.zeros(divisions.shape[1], np.int64)).longest(divisions)
        return slopes, seconds - (slopes * divisions).sum(axis=0)

    def broken(self, partition: Integers) -> tuple[Floats, Floats] | None:
        """List the memory that stages exceed, each at its fullest moment: all limits would be many."""
        one = self._one
        if one.fits(partition.reshape(-1, 1))[0]:
            return None
        if one.shares is None:
            return np.zeros((0, self.parts)), np.zeros(0)
        of_stages = one.shares[:, np.newaxis, :, 0] * _of_stages(self.parts, len(self.capacity))
        taken = of_stages @ partition
        broken = np.nonzero(taken.max(axis=0) > FULL)[0]
        return of_stages[taken.argmax(axis=0)[broken], broken], np.full(len(broken), FULL)


def _of_stages(parts: int, stages: int) -> Integers:
    """[stages, parts]: 1 where a part is of a stage."""
    return np.tile(np.eye(stages, dtype=np.int64), parts // stages)


class _Search:
    """Boxes, those with the lowest bounds first."""

    def __init__(self, one: Paths, layers: int, begin: Integers, enough: float) -> None:
        self._one, self._asked = one, enough
        self.best, self.seconds = begin, one.seconds(begin)
        self._unit = self.seconds if 0 < self.seconds < np.inf else 1.0
        """Seconds; tolerances of the linear program are parts of an iteration."""
        chunks, room = one.parts // len(one.capacity), np.minimum(one.capacity, layers)
        self._high = np.tile(room, chunks + 1 if chunks > 1 else 1)
        self._known = {begin[:, 0].tobytes()}
        self._inner, self._longest = begin[:, 0].astype(float), np.inf
        """The division whose longest path is the shortest so far, and that path's units, with nothing hidden."""
        self._problem = MinimaxLP(layers, one.parts, _of_stages(one.parts, len(room)) if chunks > 1 else None)
        self._cut(_crowded(begin[:, 0]))
        self._cut(begin)

    def run(self, most: int) -> tuple[float, int]:
        """The bound of all partitions, and how many boxes were looked at."""
        order = count()
        boxes = [(first.least, next(order), first) for first in [self._whole_box()]]
        stuck, looked_at = np.inf, 0
        while boxes and looked_at < most and boxes[0][0] < min(stuck, self._enough):
            looked_at += 1
            solved = self._cut_off(self._problem.solve(heapq.heappop(boxes)[2].node), CUTS[2])
            if solved.least >= self._enough:
                continue
            whole = _rounded(solved)
            is_whole = np.abs(solved.amounts - whole).max() <= WHOLE
            new = (is_whole or looked_at % ROUNDED == 1) and self._try(whole)
            halves = [solved] if new else [] if is_whole else self._halved(solved)
            if is_whole and not new:
                stuck = min(stuck, solved.least)
            for half in halves:
                if half.least < self._enough:
                    heapq.heappush(boxes, (half.least, next(order), half))
        return self._unit * float(min([stuck, *(least for least, _, _ in boxes[:1])])), looked_at

    @property
    def _enough(self) -> float:
        """A box that cannot go below so many units is of no use."""
        return min(self.seconds * (1 - EXACT), self._asked) / self._unit

    def _whole_box(self) -> Solved:
        """Solve the box of all partitions."""
        root = self._problem.root(np.zeros_like(self._high), self._high)
        solved = self._cut_off(self._problem.solve(root), CUTS[0])
        for _ in range(EXCLUDED):
            if solved.least >= self._enough or not self._problem.exclude(solved):
                break
            solved = self._cut_off(self._problem.solve(solved.node), CUTS[1])
        return solved

    def _cut_off(self, solved: Solved, most: int) -> Solved:
        """Cuts at the solution, and on the way inward from it, until its longest path is known."""
        inward = np.array(INWARD)
        for _ in range(most):
            if solved.least >= self._enough:
                break
            points = np.outer(solved.amounts, 1 - inward) + np.outer(self._inner, inward)
            if self._cut(points) <= solved.least * (1 + NEAR):
                break
            self._try(_rounded(solved))
            solved = self._problem.solve(solved.node)
        return solved

    def _cut(self, partitions: Layers) -> float:
        """At those that have paths; returns the units of the longest one of the first of them, with nothing hidden."""
        slopes, constants = (part / self._unit for part in self._one.longest(partitions))
        if not len(constants):
            return 0.0
        self._problem.cut(slopes.T, constants)
        takes = (constants + partitions.T @ slopes).max(axis=1)
        shortest = int(np.argmin(takes))
        if takes[shortest] < self._longest:
            self._inner, self._longest = partitions[:, shortest], takes[shortest]
        return float(takes[0])

    def _try(self, partition: Integers) -> bool:
        """Keeps it if it is the best so far; returns whether the problem has a new cut or limit for it."""
        column = partition.reshape(-1, 1)
        if partition.tobytes() in self._known or partition.min() < 0:  # a solution that was broken off is in no box
            return False
        self._known.add(partition.tobytes())
        if (broken := self._one.broken(partition)) is not None:
            self._problem.limit(*broken, whole=False)
            return len(broken[0]) > 0
        self._cut(column)
        if (taken := self._one.seconds(column)) < self.seconds:
            self.best, self.seconds = column, taken
        return True

    def _halved(self, solved: Solved) -> list[Solved]:
        """Where that raises both bounds most, of the amounts that are farthest from whole numbers; of several chunks
        first of the sums of their stages."""
        values = self._problem.bounded @ solved.amounts
        fractions, parts = values % 1, len(solved.amounts)
        distance = np.minimum(fractions, 1 - fractions)
        if (distance[parts:] > WHOLE).any():
            distance[:parts] = 0.0
        best, most = [], -1.0
        for number in np.argsort(-distance, kind="stable")[:TRIED]:
            if distance[number] > WHOLE:
                sides = _sides(solved.node, int(number), float(values[number]))
                halves = [self._problem.solve(node, STEPS) for node in sides]
                below, above = (min(half.least, self._enough) - solved.least + EXACT for half in halves)
                if below * above > most:
                    best, most = halves, below * above
        return best


def _sides(node: BoxNode, number: int, value: float) -> tuple[BoxNode, BoxNode]:
    """Split the box below and above the value of an amount or a sum."""
    below, high, low = np.floor(value), node.high.copy(), node.low.copy()
    high[number], low[number] = below, below + 1
    return replace(node, high=high), replace(node, low=low)


def _crowded(partition: Integers) -> Floats:
    """[parts, partitions]: with parts of layers, and more of them where the longest path is to be."""
    found = []
    for length in (1, 2, 4, 8, 16, 32):
        for first in range(0, len(partition) - length + 1, max(1, length // 2)):
            shares = 0.95 * (partition + 0.01)
            shares[first : first + length] *= 1.15
            found.append(shares * partition.sum() / shares.sum())
    return np.array(found).T


def _rounded(solved: Solved) -> Integers:
    """The nearest partition, by largest remainders; it is in the box, too."""
    whole = np.floor(solved.amounts + WHOLE).astype(np.int64)
    left = round(float(solved.amounts.sum())) - int(whole.sum())
    whole[np.argsort(whole - solved.amounts, kind="stable")[:left]] += 1
    return whole


PATIENCE, STALLED = (6, 40), 1e-3
"""Linear programs in a row that raise the bound by no more than this part of an iteration, until there are no more:
where stages have one chunk, and where nothing but these bounds their chunks."""
CLOSE = 1e-6
"""The part of an iteration by which a bound may stay below the seconds of the best partition."""


def proved_of_heterogeneous_layers(one: Pipelines, begin: Integers, least: float, enough: float = np.inf) -> Proof:
    """The best partition that is found on the way, from `begin` [parts, 1], which fits; and the bound, from `least` to
    `enough`. Linear programs count as boxes."""
    best, seconds, stages = begin, float(one.iteration(begin)[0]), PossibleStages.of(one)
    bound, reached, stalled, programs = stages.least(least, min(seconds, enough)), -np.inf, 0, 0
    patience = PATIENCE[one.parts_count > one.stages]
    steps, mixtures, known = stages.below(min(seconds, enough)), None, [begin]
    while bound < min(seconds * (1 - CLOSE), enough) and stalled < patience:
        mixtures, programs = mixtures or _Mixtures(one, begin), programs + 1
        slopes, of_bytes, constant = mixtures.mean_of_paths()
        found, sums = least_sum_of_steps(steps, of_first_layers(one, slopes)[..., 0], mixtures.behind(of_bytes))
        stalled = 0 if constant + sums > reached + STALLED * seconds else stalled + 1
        reached = max(reached, constant + sums)
        bound = max(bound, reached)
        if one.fits(found)[0] and (now := float(one.iteration(found)[0])) < seconds:
            best, seconds = found, now
            steps = stages.below(min(seconds, enough))
        mixtures.cut()
        if not any((found == other).all() for other in known):
            known.append(found)
            mixtures.add(found)
    return Proof(partition=best, seconds=seconds, bound=min(bound, seconds, enough), boxes=programs)


class _Mixtures:
    """The mixture of known partitions whose longest known path is shortest: a linear program, to which paths and
    partitions are added one after another. A partition counts as numbers of layers [kinds, parts], and behind them of
    bytes [stages] by which messages are longer; a path as seconds that it gains with each.
    """

    def __init__(self, pipelines: Pipelines, first: Integers) -> None:
        assert pipelines.order is not None
        self._order, self._plain = pipelines.order, pipelines.unhidden(pipelines.order.layers)
        self._shape = len(self._order.counts), pipelines.parts_count, 1
        chunks = pipelines.parts_count // pipelines.stages
        self._cuts = np.arange(pipelines.stages) + pipelines.stages * (chunks - 1)
        """The parts behind which messages count as they are, one of each stage: of several chunks' the longest ones
        count, so that no others take longer. None where paths know no messages."""
        self._cuts[-1] -= pipelines.stages  # nothing leaves the end of the model
        if self._plain.loaded(first).longest().messages is None:
            self._cuts = self._cuts[:0]
        self._cuts = self._cuts[self._cuts >= 0]
        self._slopes, self._constants = list[Floats](), list[float]()
        self._partitions = [self._numbers(first)]
        self._problem = MinimaxLP(1, 1)
        self._cut(self._partitions[0])
        self._node = self._problem.root(np.zeros(1, np.int64), np.ones(1, np.int64))
        self._mixed = self._partitions[0]

    def _numbers(self, partition: Integers) -> Floats:
        longer = self._order.extra[np.cumsum(partition)[self._cuts]]
        return np.concatenate([self._order.by_kind(partition).reshape(-1), longer])

    def mean_of_paths(self) -> tuple[Floats, Floats, float]:
        """The mean of paths that takes longest with the known partitions: [kinds, parts, 1], [cuts], and what it takes
        beside layers."""
        solved = self._problem.solve(self._node)
        self._node, self._mixed = solved.node, np.maximum(0.0, solved.amounts) @ np.stack(self._partitions)
        weights = self._problem.weights(solved.node)
        slopes, constant = weights @ np.stack(self._slopes), float(weights @ self._constants)
        whole = math.prod(self._shape)
        return slopes[:whole].reshape(self._shape), slopes[whole:], constant

    def behind(self, of_bytes: Floats) -> Floats:
        """[layers + 1, parts]: what longer messages over the cut behind a part take."""
        found = np.zeros((self._order.layers + 1, self._shape[1]))
        found[:, self._cuts] = self._order.extra[:, np.newaxis] * of_bytes
        return found

    def cut(self) -> None:
        """Add the longest path of the mixture."""
        self._cut(self._mixed)

    def add(self, partition: Integers) -> None:
        """Add one, and its longest path."""
        self._partitions.append(self._numbers(partition))
        takes = self._constants + np.stack(self._slopes) @ self._partitions[-1]
        self._node = self._problem.widened(self._node, takes)
        self._cut(self._partitions[-1])

    def _cut(self, numbers: Floats) -> None:
        whole, stages = math.prod(self._shape), self._plain.stages
        longer = np.zeros((stages, 1))
        longer[self._cuts % stages, 0] = numbers[whole:]
        lines = self._plain.without_order(longer)
        slopes, seconds, of_bytes = lines.longest_with_messages(numbers[:whole].reshape(self._shape))
        gained = np.concatenate([slopes.reshape(-1), of_bytes[self._cuts % stages, 0]])
        self._slopes.append(gained)
        self._constants.append(float(seconds[0] - gained @ numbers))
        takes = self._constants[-1] + np.stack(self._partitions) @ gained
        self._problem.cut(takes[np.newaxis], np.zeros(1))
