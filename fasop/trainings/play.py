"""Plays a training on one set of nodes: which batch it has when, as the controller of runs decides, and how long it
takes.

Between two changes of the batch all iterations take the same, so that only changes have to be found. While the noise
scale only grows, or only falls, the decisions that change nothing come first: each rule changes a batch where the noise
scale leaves an interval around it. So bisection finds the first decision that changes something.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.adaptive.controller import Controller
from megatron_ext.contract.adaptive.noise import Halves, Measurement, Noise, halves, measurement
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.iteration import SampleDivision, samples_of_halves, several


class Nodes(Protocol):
    """What a set of nodes does with a batch."""

    @property
    def weights(self) -> Sequence[int]:
        """The shares with which it begins, in proportion; one for each replica."""
        ...

    @property
    def streams(self) -> Sequence[int]:
        """Copies of the model with which it begins, by replica."""
        ...

    @property
    def ways(self) -> Sequence[Mapping[int, Sequence[int]]] | None:
        """List for each replica the sizes that its micro-batches may have, and with each of them the numbers of
        streams; None: what it begins with alone."""
        ...

    @property
    def pipelined(self) -> bool:
        """Whether what a run measures of a micro-batch depends on how many there are, as in a pipeline."""
        ...

    def seconds(self, division: SampleDivision, measures: bool = False) -> float:
        """Return the seconds of an iteration with such a division, or of one that measures the noise."""
        ...

    def times(self, division: SampleDivision, iterations: int, measures: bool) -> Times | None:
        """What a run would have measured in so many iterations, the last of which `measures` the noise; None where it
        measures no times."""
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
    """Samples of the whole training."""
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


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Iterations with the same division."""

    consumed: float
    """Samples before the first of them."""
    iterations: int
    division: SampleDivision
    seconds: float
    """Seconds of an iteration that measures nothing."""
    measured: int
    """How many of them measure the noise."""
    measured_s: float
    """Seconds of each of these; 0 without any."""

    @property
    def batch(self) -> int:
        """Samples of each of them."""
        return self.division.samples


class Player:
    """Plays a training on one set of nodes, from a state on."""

    def __init__(self, training: Training, nodes: Nodes, start: State) -> None:
        """Raises ValueError where no batch fits the bounds."""
        self._training, self._nodes = training, nodes
        self._streams = several(nodes.streams)
        adapt, batch = training.adapt, training.global_batch_size
        self._config = AdaptConfig(lower=batch, upper=batch, every=1) if adapt is None else _on(nodes, adapt)
        self.controller = Controller(
            self._config,
            training.micro_batch_size,
            training.global_batch_size,
            nodes.weights,
            start.window,
            nodes.streams,
        )
        self._every = self._config.every if adapt is not None else None
        self._halved: tuple[SampleDivision, tuple[int, int]] | None = None
        """The last division that was measured, and the samples of its halves."""
        self.fitted = False
        """Whether the batch is what is left of the samples."""
        self.iteration, self.consumed = start.iteration, start.consumed
        self._begun = start.iteration
        as_planned = sum(nodes.weights) * training.micro_batch_size == start.batch
        self.division = self.divided(tuple(nodes.weights) if as_planned else self.controller.fitted(start.batch))
        self._fit_to_end()

    def divided(
        self, shares: tuple[int, ...], sizes: tuple[int, ...] = (), streams: tuple[int, ...] = ()
    ) -> SampleDivision:
        """In micro-batches of the training's size and the streams of the nodes, where nothing else is said."""
        size = self._training.micro_batch_size
        return SampleDivision(shares, sizes or (size,) * len(shares), several(streams) if streams else self._streams)

    @property
    def batch(self) -> int:
        return self.division.samples

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
            wanted, left = min(until, self._training.samples), self._training.samples - self.consumed
            most = math.floor(left / self.batch)
            if self._config.measures:  # a batch may be smaller than any that follows it
                most = min(most, math.floor((left - self.controller.least_samples) / self.batch) + 1)
            count = min(most, math.ceil((wanted - self.consumed) / self.batch))
            iterations, after = self._to_change(count)
            measured = self._measured(iterations)
            yield Stretch(
                consumed=self.consumed,
                iterations=iterations,
                division=self.division,
                seconds=self._nodes.seconds(self.division),
                measured=measured,
                measured_s=self._nodes.seconds(self.division, measures=True) if measured else 0.0,
            )
            self.iteration += iterations
            self.consumed += iterations * self.batch
            if after is not None:
                self.division = after
            self._fit_to_end()

    def _measured(self, iterations: int) -> int:
        """How many of the next iterations measure the noise."""
        if not self._config.measures:
            return 0
        every = self._config.every
        return (self.iteration + iterations) // every - self.iteration // every

    def _fit_to_end(self) -> None:
        """The last batch has no more samples than are left."""
        left, least = self._training.samples - self.consumed, self.controller.least_samples
        if self._config.measures and least <= left < self.batch:
            size = self._training.micro_batch_size
            self.division = self.divided(self.controller.fitted(int(left) // size * size))
            self.fitted = True

    def _to_change(self, most: int) -> tuple[int, SampleDivision | None]:
        """Iterations until the division changes, `most` of them at most, and to what."""
        every = self._every
        if every is None:
            return most, None
        first = every - self.iteration % every
        decisions = 0 if most < first else (most - first) // every + 1
        known = list(self.controller.window)
        number = 0
        while number < decisions:
            after = self._decided(known, first, number)
            if after == self.division:
                end = self._alike(first, number, decisions)
                if end > number and self._decided(known, first, end) != self.division:
                    number = self._first_change(known, first, number, end)
                    after = self._decided(known, first, number)
                else:
                    number = end
            if after != self.division:
                return first + number * every, after
            number += 1
        self.controller.window = self._window(known, first, decisions)
        return most, None

    def _first_change(self, known: Sequence[Measurement], first: int, unchanged: int, changed: int) -> int:
        numbers = range(unchanged + 1, changed + 1)

        def changes(number: int) -> bool:
            return self._decided(known, first, number) != self.division

        return numbers[bisect_left(numbers, True, key=changes)]

    def _decided(self, known: Sequence[Measurement], first: int, number: int) -> SampleDivision:
        """Return the division by the decision of this number from now on."""
        controller, now = self.controller, self.division
        controller.window = self._window(known, first, number)
        found = self._halves(first, number) if self._config.measures else None
        every = self._config.every
        since = every if number else min(every, self.iteration + first - self._begun)
        times = self._nodes.times(now, since, self._config.measures)
        decision = controller.decide(now.shares, found, times, now.sizes, now.copies)
        return self.divided(decision.shares, decision.sizes, decision.streams)

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
        if self._halved is None or self._halved[0] != self.division:
            self._halved = self.division, samples_of_halves(self.division)
        return halves(self._training.noise.at(self._samples(first, number)), *self._halved[1])

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
    """With the ways in which these nodes may take micro-batches."""
    if nodes.ways is None:
        return adapt
    return replace(
        adapt,
        micro_batch_sizes=[[*of_replica] for of_replica in nodes.ways],
        streams=[[[*counts] for counts in of_replica.values()] for of_replica in nodes.ways],
    )
