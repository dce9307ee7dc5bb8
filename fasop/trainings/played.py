"""The sets of nodes of a cluster that a training may use; what it takes on one, or on one after the other; and which of
them nothing beats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from conf.schema.values.partition import NodeOrder
from fasop.costs.arrays import Floats
from fasop.trainings.play import Nodes, Stretch
from megatron_ext.contract.adaptive.forecast import HOUR

MOST = 300
"""Sets that are played; of a cluster with more, the numbers of a group's nodes go up in steps."""


@dataclass(frozen=True, kw_only=True)
class NodeSet:
    """Some nodes, which a training can use."""

    name: str
    """The nodes, written as a node order."""
    gpus: int
    price_per_hour: float | None
    """US dollars, of all of them; None: not known."""
    nodes: Nodes


def orders(whole: NodeOrder) -> list[NodeOrder]:
    """All of its nodes first, then every other number of nodes of its groups; which node of a group it is does not
    matter."""
    counts = {name: whole.groups.count(name) for name in dict.fromkeys(whole.groups)}
    by = next((by for by in range(1, max(counts.values()) + 1) if _number(counts, by) <= MOST), max(counts.values()))
    numbers = [[*range(0, count, by), count] for count in counts.values()]
    found = [
        _some(whole, dict(zip(counts, some, strict=True)))
        for some in itertools.islice(itertools.product(*(reversed(of) for of in numbers)), MOST)
        if any(some)
    ]
    return sorted(found, key=lambda order: -len(order.groups))


def _number(counts: Mapping[str, int], by: int) -> int:
    return math.prod(-(-count // by) + 1 for count in counts.values())


def _some(whole: NodeOrder, counts: dict[str, int]) -> NodeOrder:
    """The first nodes of each group."""
    left, kept = dict(counts), []
    for name in whole.groups:
        if left[name]:
            left[name] -= 1
            kept.append(name)
    return NodeOrder(tuple(kept))


def total(prices: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """Stretches of iterations with the same batch; arrays have a value for each of them."""

    consumed: Floats
    """Samples before it."""
    iterations: Floats
    batches: Floats
    """Samples of an iteration."""
    seconds: Floats
    """Seconds of an iteration that measures nothing."""
    measured: Floats
    """How many of the iterations measure the noise."""
    measured_s: Floats
    """Seconds of each of these; 0 without any."""

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> Trajectory:
        names = ("consumed", "iterations", "batch", "seconds", "measured", "measured_s")
        columns = [np.array([getattr(one, name) for one in stretches], float) for name in names]
        return cls(**dict(zip((one.name for one in fields(cls)), columns, strict=True)))

    @property
    def whole_s(self) -> Floats:
        """Seconds of all iterations."""
        return (self.iterations - self.measured) * self.seconds + self.measured * self.measured_s

    def __bool__(self) -> bool:
        return len(self.consumed) > 0


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What is trained on the same nodes without a restart."""

    node_set: NodeSet
    restart_s: float
    """Before it."""
    trajectory: Trajectory

    @cached_property
    def seconds(self) -> float:
        return self.restart_s + float(self.trajectory.whole_s.sum())

    @property
    def dollars(self) -> float | None:
        price = self.node_set.price_per_hour
        return None if price is None else self.seconds / HOUR * price


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A part of a training."""

    number: int
    """From 1 on."""
    nodes: str
    """At its end."""
    batch: float
    """Samples of an iteration, on average."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Played:
    """A whole training."""

    name: str
    legs: Sequence[Leg]
    """Each has a stretch at least."""

    @cached_property
    def seconds(self) -> float:
        return sum(leg.seconds for leg in self.legs)

    @cached_property
    def dollars(self) -> float | None:
        return total([leg.dollars for leg in self.legs])

    @property
    def iterations(self) -> int:
        return int(self._cumulated[2][-1])

    @property
    def consumed(self) -> float:
        """Samples at the end."""
        return float(self._cumulated[0][-1])

    @property
    def first_batch(self) -> int:
        return int(self.legs[0].trajectory.batches[0])

    @property
    def largest_batch(self) -> int:
        return int(max(leg.trajectory.batches.max() for leg in self.legs))

    def steps(self) -> list[tuple[float, int]]:
        """Consumed samples and the global batch from there on, wherever it changes, and the last one at the end."""
        consumed = np.concatenate([leg.trajectory.consumed for leg in self.legs])
        batches = np.concatenate([leg.trajectory.batches for leg in self.legs])
        changes = np.flatnonzero(np.diff(batches, prepend=0.0))
        found = [(float(consumed[place]), int(batches[place])) for place in changes]
        return [*found, (self.consumed, found[-1][1])]

    def trajectory(self) -> tuple[list[float], list[float]]:
        """Samples, and the seconds until they were trained, wherever the pace changes."""
        samples, seconds, _ = self._cumulated
        return samples.tolist(), seconds.tolist()

    def epochs(self, samples: float) -> list[Epoch]:
        """Spans of so many samples; the last one may be shorter."""
        consumed, seconds, iterations = self._cumulated
        count = max(1, math.ceil(self.consumed / samples - 1e-9))
        ends = np.minimum(np.arange(count + 1) * samples, self.consumed)
        took, updates = np.diff(np.interp(ends, consumed, seconds)), np.diff(np.interp(ends, consumed, iterations))
        begun = np.array([leg.trajectory.consumed[0] for leg in self.legs])
        names = [leg.node_set.name for leg in self.legs]
        at = np.searchsorted(begun, ends[1:], side="left") - 1
        return [
            Epoch(
                number=number + 1,
                nodes=names[max(0, at[number])],
                batch=float((ends[number + 1] - ends[number]) / updates[number]),
                seconds=float(took[number]),
            )
            for number in range(count)
        ]

    @cached_property
    def _cumulated(self) -> tuple[Floats, Floats, Floats]:
        """Samples, seconds and iterations, at the beginning and behind each stretch. A restart counts with the stretch
        behind it."""
        samples, took, counts = [np.zeros(1)], [np.zeros(1)], [np.zeros(1)]
        for leg in self.legs:
            trajectory = leg.trajectory
            seconds = trajectory.whole_s
            seconds[0] += leg.restart_s
            samples.append(trajectory.consumed + trajectory.iterations * trajectory.batches)
            took.append(seconds)
            counts.append(trajectory.iterations)
        return np.concatenate(samples), np.cumsum(np.concatenate(took)), np.cumsum(np.concatenate(counts))


def quickest(trainings: Sequence[Played]) -> Played:
    """Return the quickest training; the cheapest of those that take equally long."""
    return min(trainings, key=lambda one: (one.seconds, math.inf if one.dollars is None else one.dollars))


def cheapest(trainings: Sequence[Played]) -> Played | None:
    """Return the cheapest training, the quickest of those that cost the same; None where no price is known."""
    priced = [(one.dollars, one.seconds, number) for number, one in enumerate(trainings) if one.dollars is not None]
    return trainings[min(priced)[2]] if priced else None


def front(trainings: Sequence[Played]) -> list[Played]:
    """Those that no other one beats in time and dollars, the quickest first; of equal ones the first. Without prices
    the quickest alone."""
    kept = list[Played]()
    for one in sorted(trainings, key=lambda one: (one.seconds, math.inf if one.dollars is None else one.dollars)):
        if not kept or (one.dollars is not None and one.dollars < (kept[-1].dollars or math.inf)):
            kept.append(one)
    return kept
