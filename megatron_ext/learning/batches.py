"""The global batches of a training in one process, as a run decides them: from the gradients of both halves of one."""

from __future__ import annotations

import math
from typing import Optional

from megatron_ext.contract.adaptive.controller import Controller
from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.plan import Plan


class Batches:
    """Of one training; all of one size where the plan's batch does not adapt."""

    def __init__(self, plan: Plan) -> None:
        self._size, self._samples = plan.micro_batch_size, plan.train.samples
        self._adapt = None if plan.adapt is None or not plan.adapt.measures else plan.adapt
        self._controller: Optional[Controller] = None
        if self._adapt is not None:
            self._controller = Controller(
                self._adapt, plan.micro_batch_size, plan.global_batch_size, tuple(plan.micro_batches)
            )
        self.consumed = 0
        """Samples, before the next iteration."""
        self.count = plan.global_batch_size // plan.micro_batch_size
        """Micro-batches of the next iteration."""
        self._fit_to_end()

    @property
    def samples(self) -> int:
        """Of the next iteration."""
        return self.count * self._size

    @property
    def over(self) -> bool:
        """Whether fewer samples are left than a batch has at least."""
        return self._controller is not None and self._left < self._controller.least_samples

    def measures(self, iteration: int) -> bool:
        """Whether the gradients of the halves are to be looked at in this iteration."""
        return self._adapt is not None and self._adapt.due(iteration)

    def after(self, iteration: int, halves: Optional[Halves]) -> None:
        """When an iteration is done, of which `halves` are what was measured if it was to measure."""
        self.consumed += self.samples
        if self._controller is not None and self.measures(iteration):
            replicas = len(self._controller.fitted(self.samples))
            shares = (self.count - replicas + 1, *[1] * (replicas - 1))  # whose sum alone counts
            self.count = sum(self._controller.decide(shares, halves).shares)
        self._fit_to_end()

    @property
    def _left(self) -> float:
        return math.inf if self._samples is None else self._samples - self.consumed

    def _fit_to_end(self) -> None:
        """The last batch has no more samples than are left."""
        if self._controller is not None and self._controller.least_samples <= self._left < self.samples:
            self.count = sum(self._controller.fitted(int(self._left) // self._size * self._size))
