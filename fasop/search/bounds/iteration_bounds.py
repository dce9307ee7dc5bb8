"""What an iteration takes at least, from the classes of its stages and what it takes beside layers.

The chains of waits are those of `fasop.partition.bounds`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.frozen import replace
from fasop.partition.class_bounds import Classes, in_parts, in_whole, largest, reach
from fasop.search.bounds.gpu_classes import Way


class Beside(NamedTuple):
    """What plans take beside their layers, at least; seconds, [plans] each. The first four are of `OnLinks`."""

    hops: Floats
    around: Floats
    queue: Floats
    ending: Floats
    embedding: Floats
    """Its forward pass, and the part of its backward pass that a micro-batch waits for."""
    head: Floats
    one_way: Floats
    """A layer's forward or its backward pass, the longer one, on whichever kind it is shortest."""

    def take(self, plans: Integers) -> Beside:
        return Beside(*(seconds[plans] for seconds in self))

    def trip(self, chunks: int) -> Floats:
        """[plans]: of the first micro-batch, through all parts and back."""
        messages = 2 * (chunks * self.hops + (chunks - 1) * self.around)
        return np.asarray(messages + self.embedding + self.head)


def ends_of(way: Way, seconds: Floats) -> Floats:
    """[plans, 2]: `Beside.embedding` and `Beside.head`; for `seconds` see `_Times`."""
    forward, backward = np.moveaxis(seconds[:, :2].min(axis=2), 2, 0)
    return np.asarray(forward + way.schedule.definition.input_share * backward)


def least_seconds(classes: Classes, beside: Beside, count: Integers, way: Way, units: Floats) -> Floats:
    """[plans]: seconds of an iteration, at least.

    Layers are taken for amounts of work, which need not be whole numbers (where layers differ as in
    `fasop.partition.heterogeneous_layers`); nor need stages be.
    """
    trip = beside.trip(way.chunks)
    least: Floats = trip + passes_in_parts(classes, way, units) + beside.ending
    if way.chunks > 1:
        messages = (way.chunks + 1) * beside.hops + (way.chunks - 1) * beside.around
        trip = messages + beside.embedding + beside.head + units * beside.one_way
    else:
        trip = trip + units * classes.trip[:, 0]
    queue = trip + (way.chunks * count - 1) * beside.queue
    least = np.maximum(least, queue + beside.ending)
    if not way.schedule.definition.splits_backward:
        even = units / (classes.stages / classes.both).sum(axis=1)
        least = np.maximum(least, count * even + beside.ending)
    if not way.schedule.definition.has_chunks:
        fixed = (beside.embedding + beside.head) / classes.slowest
        least = np.maximum(least, beside.ending + (units + fixed) / reach(classes, count))
    return least


def passes_in_parts(classes: Classes, way: Way, units: Floats) -> Floats:
    """[plans]: as `passes_in_whole`, of parts of layers."""
    passes = in_parts(classes.stages, classes.trip, classes.left, units)
    if way.schedule.definition.has_chunks:
        parts = way.chunks * classes.stages
        passes = np.maximum(passes, in_parts(parts, classes.trip, classes.of_part[..., np.newaxis], units))
    return passes


def passes_in_whole(classes: Classes, way: Way, layers: int) -> Floats:
    """[plans]: the passes of the first micro-batch's trip, and those left of the largest stage, in whole layers."""
    head = classes.head, classes.of_last
    passes = in_whole(classes.stages, classes.trip, classes.left, layers, head)
    if way.schedule.definition.has_chunks:
        turn = in_whole(way.chunks * classes.stages, classes.trip, classes.turn[..., np.newaxis], layers)
        passes = np.maximum(passes, turn)
    return passes


def least_in_whole(classes: Classes, beside: Beside, count: Integers, way: Way, layers: int) -> Floats:
    """[plans]: seconds of an iteration, at least, where layers are alike and stages have whole ones."""
    least = np.maximum(
        beside.trip(way.chunks) + beside.ending + passes_in_whole(classes, way, layers),
        largest(classes.stages, classes.busy, layers),
    )
    if not way.schedule.definition.splits_backward:
        each = classes.both[..., np.newaxis] * np.arange(1.0, layers + 1)
        least = np.maximum(least, count * largest(classes.stages, each, layers) + beside.ending)
    return np.asarray(least)


def least_of_mixed_replicas(classes: Classes, beside: Beside, count: Integers, way: Way, units: Floats) -> Floats:
    """[plans]: as `least_seconds`, where the GPUs of a stage may be of three or more kinds.

    The largest bound counts: for each number of fastest kinds, as if these were one kind and the others another one;
    and for the mean of all replicas, whose stages need not be whole numbers.
    """
    bounds = [least_seconds(two, beside, count, way, units) for two in classes.in_twos]
    of_mean = replace(classes, stages=classes.shares)
    return np.max([*bounds, least_seconds(of_mean, beside, count, way, units)], axis=0)
