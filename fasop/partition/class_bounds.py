"""What layers take at least on stages of which only the number of each class is known, not their order.

A class has the stages whose slowest GPU is of one kind. The chains of waits are those of `fasop.partition.bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.partition.bounds import whole_of
from fasop.simulation.linear import TINY, Linear


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The stages of plans, by the slowest kind of their GPUs; [plans, kinds], the fastest kind first.

    Seconds of a layer, which are at least as many with every kind as with the one before it.
    """

    stages: Integers | Floats
    shares: Floats
    """How many of the stages the GPUs of a kind would fill: parts of them, too."""
    trip: Floats
    """For a micro-batch there and back, but for what `zb_h1` puts off."""
    both: Floats
    """With that."""
    left: Floats
    """[plans, kinds, places]: of the passes that are left after the first gradient has left a stage in this place."""
    turn: Floats
    """With several chunks, of the backward passes of one that follow its first one in turn
    (`fasop.partition.bounds`)."""
    of_part: Floats
    """With several chunks these, and of what the stage has left then."""
    busy: Floats
    """[plans, kinds, layers]: of all passes of one layer, two and so on, and of the sums of their gradients."""
    slowest: Floats
    """[plans]: `trip` on a stage of all kinds."""
    head: Floats
    """What the last stage has `left` of the head, and of a layer."""
    of_last: Floats

    def take(self, plans: Integers) -> Classes:
        return Classes(**{field.name: getattr(self, field.name)[plans] for field in fields(self)})

    @property
    def in_twos(self) -> list[Classes]:
        """For each kind but the fastest one: all faster kinds as fast as that, and all others as this one."""
        return [self._in_two(kind) for kind in range(1, self.stages.shape[1])]

    def _in_two(self, kind: int) -> Classes:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        two = {name: value[:, [0, kind]] for name, value in values.items() if value.ndim > 1}
        for name in ("stages", "shares"):
            two[name] = np.add.reduceat(values[name], [0, kind], axis=1)
        return Classes(**(values | two))


def suffix_min(times: Floats) -> Floats:
    """[plans, kinds, …]: of each kind the least of its own and all slower ones' times."""
    return np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]


def in_parts(stages: Integers | Floats, trip: Floats, left: Floats, layers: int | Floats) -> Floats:
    """[plans]: the first micro-batch's passes and what the largest stage has left then, at least, if layers have parts.

    `stages` and `trip` are [plans, kinds], `left` [plans, kinds, places]: each kind of stage is in the places where it
    has least left.
    """
    share = stages / np.maximum(left[..., 0], TINY)
    if left.shape[2] > 1:
        room = np.cumsum(1 / np.maximum(np.sort(left, axis=2), TINY), axis=2)
        room = np.concatenate([np.zeros((*room.shape[:2], 1)), room], axis=2)
        below = np.floor(stages).astype(np.int64)[..., np.newaxis]
        share = np.take_along_axis(room, below, axis=2)[..., 0]
        following = np.take_along_axis(room, np.minimum(below + 1, room.shape[2] - 1), axis=2)[..., 0]
        share = share + (stages - below[..., 0]) * (following - share)
    prices = (1 + np.cumsum(share * trip, axis=1)) / np.maximum(np.cumsum(share, axis=1), TINY)
    return layers * prices.min(axis=1)


def in_whole(
    stages: Integers | Floats, trip: Floats, left: Floats, layers: int, head: tuple[Floats, Floats] | None = None
) -> Floats:
    """[plans]: as `in_parts`, of whole layers.

    `head`, [plans, kinds] each: what the last stage has left besides, and what it has left of a layer; the stage is of
    that kind with which all takes least.
    """
    last = np.cumsum(stages, axis=1)[..., np.newaxis]
    row = np.arange(last.max())
    kind = np.minimum((row >= last).sum(axis=1), stages.shape[1] - 1)
    place = row - np.take_along_axis((last[..., 0] - stages), kind, axis=1)
    places = np.arange(len(kind))[:, np.newaxis], kind, np.minimum(place, left.shape[2] - 1)
    here = row < last[:, -1]
    layer = np.where(here, np.maximum(np.sort(left, axis=2)[places], TINY), 1.0).T
    fixed = np.zeros(layer.shape)
    trips, room = np.take_along_axis(trip, kind, axis=1).T, np.where(here, layers, 0).T
    if head is None:
        return whole_of(trips, Linear(fixed=fixed, layer=layer), room, layers)
    found = []
    for number, (beside, of_layer) in enumerate(zip(head[0].T, np.maximum(head[1], TINY).T, strict=True)):
        with_head = row == last[:, number] - 1
        costs = Linear(fixed=np.where(with_head.T, beside, fixed), layer=np.where(with_head.T, of_layer, layer))
        found.append(np.where(stages[:, number] > 0, whole_of(trips, costs, room, layers), np.inf))
    return np.min(found, axis=0)


def largest(stages: Integers | Floats, seconds: Floats, layers: int) -> Floats:
    """[plans]: the largest stage's seconds, at least; `stages` are [plans, kinds], `seconds` [plans, kinds, layers]."""
    number = len(stages)
    each = seconds.reshape(number, -1)
    order = np.argsort(each, axis=1, kind="stable")
    held = np.cumsum(np.take_along_axis(np.repeat(stages, layers, axis=1), order, axis=1), axis=1)
    enough = np.argmax(held >= layers, axis=1)
    return each[np.arange(number), order[np.arange(number), enough]]


def reach(classes: Classes, micro_batches: Integers) -> Floats:
    """[plans]: layers that a second has room for, at most, if the stages are busy one after another.

    A stage computes U for each of M micro-batches, and waits while the first one goes through the stages before it,
    and the last one back: U_0 + ... + U_(s-1) + M U_s is at most the iteration T. So all stages together have at most
    T/M times the sum of (1 - 1/M)^s / l_s layers, if a layer takes l_s on stage s: the fastest stages first. (With
    `zb_h1`, U and l are without what it puts off, which is at most half of the backward passes.)
    """
    share = 1 - 1 / micro_batches[:, np.newaxis]
    last = np.cumsum(classes.stages, axis=1)
    return ((share ** (last - classes.stages) - share**last) / classes.trip).sum(axis=1)
