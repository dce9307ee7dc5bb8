"""Plays a training on one set of nodes: which batch it has when, as the controller of runs decides, and how long it
takes.

Between two changes of the batch all iterations take the same, so that only changes have to be found. While the noise
scale only grows, or only falls, the decisions that change nothing come first: each rule changes a batch where the noise
scale leaves an interval around it. So bisection finds the first decision that changes something.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_ext.contract.adaptive.config import NONE, AdaptConfig
from megatron_ext.contract.adaptive.controller import Controller, Decision
from megatron_ext.contract.adaptive.expected import Noise, halves
from megatron_ext.contract.adaptive.noise import Halves, Measurement, measurement
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.deal import Division, samples_of_halves


class Nodes(Protocol):
    """What a set of nodes does with a batch."""

    @property
    def weights(self) -> Sequence[int]:
        """The shares with which it begins, in proportion; one for each replica."""
        ...

    @property
    def sizes(self) -> list[list[int]] | None:
        """By replica, the sizes that its micro-batches may have; None: the training's alone."""
        ...

    def seconds(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> float:
        """Of an iteration in which the replicas take so many micro-batches each, of so many samples; empty: of the
        training's size."""
        ...

    def times(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Times | None:
        """What a run would measure; None where it measures none."""
        ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on whatever nodes."""

    adapt: AdaptConfig | None
    """None: the batch stays as it is."""
    micro_batch_size: int
    global_batch_size: int
    """With which it begins, in samples."""
    samples: float
    """Of the whole training."""
    noise: Noise | None
    """None: nobody looks at it."""


@dataclass(frozen=True)
class State:
    """How far a training has come."""

    iteration: int
    consumed: float
    """Samples."""
    batch: int
    """The global batch of the next iterations, in samples."""
    window: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """Iterations with the same shares."""

    consumed: float
    """Samples before the first of them."""
    iterations: int
    shares: tuple[int, ...]
    seconds: float
    """Of each of them."""
    batch: int
    """Samples of each of them."""
    sizes: tuple[int, ...] = ()
    """Of the micro-batches of each replica; empty: the training's."""


class Player:
    """Of a training on one set of nodes, from a state on."""

    def __init__(self, training: Training, nodes: Nodes, start: State) -> None:
        """Raises ValueError where no batch fits the bounds."""
        self._training, self._nodes = training, nodes
        adapt = training.adapt
        self._config = _fixed(training.global_batch_size) if adapt is None else _on(nodes, adapt)
        self.controller = Controller(
            self._config, training.micro_batch_size, training.global_batch_size, nodes.weights, start.window
        )
        self._every = self._config.every if adapt is not None else None
        self._halved: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]] | None = None
        """Of the last division that was measured, the samples of its halves."""
        self.fitted = False
        """Whether the batch is what is left of the samples."""
        self.iteration, self.consumed = start.iteration, start.consumed
        as_planned = sum(nodes.weights) * training.micro_batch_size == start.batch
        self.shares = tuple(nodes.weights) if as_planned else self.controller.fitted(start.batch)
        self.sizes: tuple[int, ...] = ()
        """Of the micro-batches of each replica; empty: the training's."""
        self._fit_to_end()

    @property
    def batch(self) -> int:
        sizes = self.sizes or (self._training.micro_batch_size,) * len(self.shares)
        return Division(self.shares, sizes).samples

    @property
    def state(self) -> State:
        return State(self.iteration, self.consumed, self.batch, tuple(self.controller.window))

    @property
    def over(self) -> bool:
        """Whether fewer samples are left than a batch has at least."""
        least = self.controller.least_samples if self._config.measures else self.batch
        return self._training.samples - self.consumed < least

    def play(self, until: float = math.inf) -> Iterator[Stretch]:
        """To the first iteration behind which `until` samples are trained, or to the end."""
        while self.consumed < until and not self.over:
            wanted = min(until, self._training.samples)
            most = math.floor((self._training.samples - self.consumed) / self.batch)
            count = min(most, math.ceil((wanted - self.consumed) / self.batch))
            iterations, decision = self._to_change(count)
            seconds = self._nodes.seconds(self.shares, self.sizes)
            yield Stretch(self.consumed, iterations, self.shares, seconds, self.batch, self.sizes)
            self.iteration += iterations
            self.consumed += iterations * self.batch
            if decision is not None:
                self.shares, self.sizes = decision.shares, decision.sizes
            self._fit_to_end()

    def _fit_to_end(self) -> None:
        """The last batch has no more samples than are left."""
        left, least = self._training.samples - self.consumed, self.controller.least_samples
        if self._config.measures and least <= left < self.batch:
            size = self._training.micro_batch_size
            self.shares, self.sizes = self.controller.fitted(int(left) // size * size), ()
            self.fitted = True

    def _to_change(self, most: int) -> tuple[int, Decision | None]:
        """Iterations until the shares change, `most` of them at most, and to what."""
        every = self._every
        if every is None:
            return most, None
        first = every - self.iteration % every
        decisions = 0 if most < first else (most - first) // every + 1
        known = list(self.controller.window)
        number = 0
        while number < decisions:
            decision = self._decided(known, first, number)
            if not self._changes(decision):
                end = self._alike(first, number, decisions)
                if end > number and self._changes(self._decided(known, first, end)):
                    number = self._first_change(known, first, number, end)
                    decision = self._decided(known, first, number)
                else:
                    number = end
            if self._changes(decision):
                return first + number * every, decision
            number += 1
        self.controller.window = self._window(known, first, decisions)
        return most, None

    def _first_change(self, known: Sequence[Measurement], first: int, unchanged: int, changed: int) -> int:
        numbers = range(unchanged + 1, changed + 1)
        return numbers[bisect_left(numbers, True, key=lambda one: self._changes(self._decided(known, first, one)))]

    def _changes(self, decision: Decision) -> bool:
        return (decision.shares, decision.sizes) != (self.shares, self.sizes)

    def _decided(self, known: Sequence[Measurement], first: int, number: int) -> Decision:
        """By the decision of this number from now on."""
        controller = self.controller
        controller.window = self._window(known, first, number)
        found = None
        if self._config.measures:
            found = self._halves(first, number)
        return controller.decide(self.shares, found, self._nodes.times(self.shares, self.sizes), self.sizes)

    def _window(self, known: Sequence[Measurement], first: int, number: int) -> list[Measurement]:
        """What was measured before the decision of this number."""
        if not self._config.measures:
            return []
        smoothing = self._config.smoothing
        own = [
            found
            for before in range(max(0, number - smoothing), number)
            if (found := measurement(self._halves(first, before))) is not None
        ]
        return [*known, *own][-smoothing:]

    def _halves(self, first: int, number: int) -> Halves:
        """What is measured for the decision of this number."""
        assert self._training.noise is not None, "a rule looks at the noise"
        size = self._training.micro_batch_size
        if self._halved is None or self._halved[:2] != (self.shares, self.sizes):
            division = Division(self.shares, self.sizes or (size,) * len(self.shares))
            self._halved = self.shares, self.sizes, samples_of_halves(division)
        return halves(self._training.noise.at(self._samples(first, number)), *self._halved[2])

    def _samples(self, first: int, number: int) -> float:
        """Consumed when this decision is made."""
        assert self._every is not None
        return self.consumed + (first + number * self._every) * self.batch

    def _alike(self, first: int, number: int, decisions: int) -> int:
        """The last decision up to which the noise scale that decisions see only grows, or only falls."""
        if not self._config.measures:
            return decisions - 1
        assert self._training.noise is not None and self._every is not None
        if number < self._config.smoothing:  # it sees measurements of other batches, or too few
            return number
        turns = self._training.noise.turns
        place = bisect_right(turns, self._samples(first, number - self._config.smoothing))
        if place == len(turns):
            return decisions - 1
        ahead = (turns[place] - self.consumed) / self.batch - first
        return min(decisions - 1, max(number, math.floor(ahead / self._every)))


def _on(nodes: Nodes, adapt: AdaptConfig) -> AdaptConfig:
    """With the sizes of micro-batches that these nodes may have."""
    return adapt if nodes.sizes is None else replace(adapt, micro_batch_sizes=nodes.sizes)


def _fixed(batch: int) -> AdaptConfig:
    """That changes nothing."""
    return AdaptConfig(NONE, 0.3, batch, batch, 1, 0.1, 1, "none", rebalance=False)
