"""Plays a training on many sets of nodes, in one course where their batches follow each other alike.

What a rule that looks at nothing but the noise decides does not depend on the nodes: whoever begins with the same batch
and may have the same ones goes through the same batches. Only how the replicas share these, and how long they take, is
found for each set of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fasop.costs.arrays import Integers
from fasop.trainings.play import Nodes, Player, State, Training
from fasop.trainings.played import Course
from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.adaptive.rules import BatchRange
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.deal import Division


class Courses:
    """Of one training from its beginning."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._known: dict[tuple[BatchRange, int], _Batches] = {}

    def on(self, nodes: Nodes) -> Course:
        """What these nodes go through; nothing if the samples are less than a batch.

        Raises ValueError where no batch fits the bounds.
        """
        training = self._training
        player = Player(training, nodes, State(0, 0.0, training.global_batch_size))
        adapt, batches = training.adapt, player.controller.batches
        if adapt is None or batches is None or adapt.follows_times or not _simple(nodes, adapt):
            return Course.of([*player.play()])
        key = batches, sum(player.division.shares)
        if key not in self._known:
            self._known[key] = _batches(training, *key)
        return _taken(self._known[key], player, nodes, adapt)


def _simple(nodes: Nodes, adapt: AdaptConfig) -> bool:
    """Whether replicas take the micro-batches of every batch in one order (`shares.dealt`)."""
    return nodes.ways is None and max(nodes.streams) == 1 and not (adapt.rebalance and nodes.pipelined)


@dataclass(frozen=True)
class _Batches:
    """A course whose seconds nobody knows."""

    course: Course
    fitted: bool
    """Whether the last stretch is what was left of the samples."""
    counts: Sequence[int]
    """Micro-batches of its batches, each number once, upwards."""
    place: Integers
    """Among them, of each stretch."""


class _Anywhere:
    """Nodes that take a batch whole, of which nobody knows how long they take."""

    ways = None
    streams = (1,)
    pipelined = False

    def __init__(self, count: int) -> None:
        self.weights = (count,)

    def seconds(self, division: Division, measures: bool = False) -> float:
        return 0.0

    def times(self, division: Division, iterations: int, measures: bool) -> Times | None:
        return None


def _batches(training: Training, batches: BatchRange, count: int) -> _Batches:
    """That follow each other from one of `count` micro-batches on."""
    size = training.micro_batch_size
    assert training.adapt is not None, "a batch that stays is not shared"
    adapt = replace(training.adapt, lower=batches.least * size, upper=batches.most * size)
    player = Player(replace(training, adapt=adapt), _Anywhere(count), State(0, 0.0, count * size))
    course = Course.of([*player.play()])
    counts, place = np.unique(np.rint(course.batches / size).astype(int), return_inverse=True)
    return _Batches(course, player.fitted, counts.tolist(), place)


def _taken(batches: _Batches, player: Player, nodes: Nodes, adapt: AdaptConfig) -> Course:
    """By nodes whose player has not begun."""
    course, controller = batches.course, player.controller
    if not course:
        return course
    times = nodes.times(player.division, adapt.every, adapt.measures) if adapt.rebalance else None
    divisions = [player.divided(one) for one in _dealt(controller.order(times), len(nodes.weights), batches.counts)]
    seconds, measured_s = (
        np.array([nodes.seconds(one, measures) for one in divisions])[batches.place] for measures in (False, True)
    )
    ends = [(0, player.division)]
    if batches.fitted and len(seconds) > 1:
        ends.append((-1, player.divided(controller.fitted(int(course.batches[-1])))))
    for place, division in ends:
        seconds[place], measured_s[place] = nodes.seconds(division), nodes.seconds(division, measures=True)
    course = replace(course, seconds=seconds, measured_s=np.where(course.measured, measured_s, 0.0))
    now = player.division
    balanced = player.divided(controller.decide(now.shares, None, times, now.sizes, now.copies).shares)
    if balanced != now and course.iterations[0] > adapt.every:  # the first decision changes the shares alone
        return _split(course, adapt.every, nodes.seconds(balanced), nodes.seconds(balanced, measures=True))
    return course


def _split(course: Course, iterations: int, seconds: float, measured_s: float) -> Course:
    """With its first stretch in two: so many iterations as they are, the last of which measures, and the others of
    other seconds."""
    left, batch, measured = float(course.iterations[0]) - iterations, course.batches[0], course.measured[0] - 1
    return Course(
        consumed=np.insert(course.consumed, 1, course.consumed[0] + iterations * batch),
        iterations=np.concatenate([[iterations, left], course.iterations[1:]]),
        batches=np.insert(course.batches, 1, batch),
        seconds=np.insert(course.seconds, 1, seconds),
        measured=np.concatenate([[1.0, measured], course.measured[1:]]),
        measured_s=np.insert(course.measured_s, 1, measured_s if measured else 0.0),
    )


def _dealt(order: Iterator[int], replicas: int, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """The shares of each number of micro-batches, upwards."""
    shares, found, known = [1] * replicas, [], replicas
    for count in counts:
        for _ in range(count - known):
            shares[next(order)] += 1
        known = count
        found.append(tuple(shares))
    return found
