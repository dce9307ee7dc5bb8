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
from megatron_ext.contract.adaptive.rules import Rungs
from megatron_ext.contract.adaptive.shares import Times


class Courses:
    """Of one training from its beginning."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._known: dict[tuple[Rungs, int], _Batches] = {}

    def on(self, nodes: Nodes) -> Course:
        """What these nodes go through; nothing if the samples are less than a batch.

        Raises ValueError where no batch fits the bounds.
        """
        training = self._training
        player = Player(training, nodes, State(0, 0.0, training.global_batch_size))
        adapt, rungs = training.adapt, player.controller.rungs
        if adapt is None or rungs is None or adapt.follows_times or nodes.sizes is not None:
            return Course.of([*player.play()])
        key = rungs, sum(player.shares)
        if key not in self._known:
            self._known[key] = _batches(training, *key)
        return _taken(self._known[key], player, nodes, adapt)


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

    sizes = None

    def __init__(self, count: int) -> None:
        self.weights = (count,)

    def seconds(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> float:
        return 0.0

    def times(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Times | None:
        return None


def _batches(training: Training, rungs: Rungs, count: int) -> _Batches:
    """That follow each other from one of `count` micro-batches on."""
    size = training.micro_batch_size
    assert training.adapt is not None, "a batch that stays is not shared"
    adapt = replace(training.adapt, lower=rungs.least * size, upper=rungs.most * size)
    player = Player(replace(training, adapt=adapt), _Anywhere(count), State(0, 0.0, count * size))
    course = Course.of([*player.play()])
    counts, place = np.unique(np.rint(course.batches / size).astype(int), return_inverse=True)
    return _Batches(course, player.fitted, counts.tolist(), place)


def _taken(batches: _Batches, player: Player, nodes: Nodes, adapt: AdaptConfig) -> Course:
    """By nodes whose player has not begun."""
    course, controller = batches.course, player.controller
    if not course:
        return course
    times = nodes.times(player.shares) if adapt.rebalance else None
    shares = _dealt(controller.order(times), len(player.shares), batches.counts)
    seconds = np.array([nodes.seconds(one) for one in shares])[batches.place]
    seconds[0] = nodes.seconds(player.shares)
    if batches.fitted and len(seconds) > 1:
        seconds[-1] = nodes.seconds(controller.fitted(int(course.batches[-1])))
    course = replace(course, seconds=seconds)
    balanced = controller.decide(player.shares, None, times).shares
    if balanced != player.shares and course.iterations[0] > adapt.every:  # the first decision changes the shares alone
        return _split(course, adapt.every, nodes.seconds(balanced))
    return course


def _split(course: Course, iterations: int, seconds: float) -> Course:
    """With its first stretch in two: so many iterations as they are, and the others of other seconds."""
    left, batch = float(course.iterations[0]) - iterations, course.batches[0]
    return Course(
        consumed=np.insert(course.consumed, 1, course.consumed[0] + iterations * batch),
        iterations=np.concatenate([[iterations, left], course.iterations[1:]]),
        batches=np.insert(course.batches, 1, batch),
        seconds=np.insert(course.seconds, 1, seconds),
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
