"""What islands learn, which train by themselves and take a common step every so many iterations, one after another."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import numpy as np
import torch

from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples
from megatron_ext.learning.flushed import FlushedTraining
from megatron_ext.tasks.task import Micro, Task, Tensors


class IslandTraining:
    """A plan's training with every island's whole model in this process, each with its own replicas' samples."""

    def __init__(self, plan: Plan, task: Task, samples: Samples) -> None:
        assert plan.train.sync_every is not None
        self._every, self._last = plan.train.sync_every, plan.train.iterations
        taken = [
            np.sort(np.concatenate([plan.taken_by(0, replica) for replica in replicas]))
            for replicas in plan.layout.island_replicas
        ]
        self._parts = [len(numbers) / sum(map(len, taken)) for numbers in taken]
        self._islands = [FlushedTraining(plan, task, samples, numbers) for numbers in taken]
        self.batches = self._islands[0].batches

    def step(self, iteration: int) -> float:
        """Trains all islands on their parts of the next global batch, and returns its loss.

        Raises:
            NotFinite: the loss or the gradient of one is not finite.
        """
        loss = sum(part * island.step(iteration) for part, island in zip(self._parts, self._islands))
        if iteration % self._every == 0 or iteration == self._last:
            mean = torch.stack([part * island.weights for part, island in zip(self._parts, self._islands)]).sum(0)
            for island in self._islands:
                island.meet(mean)
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has `forward` give what an evaluation of the run takes: with the weights after the last common step."""
        with self._islands[0].evaluating():
            yield

    def forward(self, micro: Micro) -> Tensors:
        """What leaves the model, while evaluating."""
        return self._islands[0].forward(micro)
