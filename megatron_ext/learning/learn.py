"""Trains a plan's model in this process with the delays of the plan: `DelayedTraining` where its stages update by
themselves, `IslandTraining` where islands do, `FlushedTraining` elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator, Mapping, NamedTuple, Tuple, Union

import numpy as np
import torch

from megatron_ext.contract.goal import SPLIT
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.streams import LATEST
from megatron_ext.data.samples import Samples
from megatron_ext.engine.evaluation import evaluate_whole, samples_to_evaluate
from megatron_ext.engine.streams.streaming import require_untied
from megatron_ext.families.tasks import task_of
from megatron_ext.learning.delayed import DelayedTraining
from megatron_ext.learning.flushed import Batches, FlushedTraining
from megatron_ext.tasks.cut import check
from megatron_ext.tasks.task import Task


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
        first = self._islands[0]  # evaluations take the weights after the last common step, which all have
        self.batches, self.evaluating, self.forward = first.batches, first.evaluating, first.forward

    def step(self, iteration: int) -> float:
        """Trains all islands on their parts of the next global batch, and returns its loss. Raises NotFinite: the loss
        or the gradient of one is not finite."""
        loss = sum(part * island.step(iteration) for part, island in zip(self._parts, self._islands))
        if iteration % self._every == 0 or iteration == self._last:
            mean = torch.stack([part * island.weights for part, island in zip(self._parts, self._islands)]).sum(0)
            for island in self._islands:
                island.meet(mean)
        return loss


Training = Union[DelayedTraining, FlushedTraining, IslandTraining]


class Learned(NamedTuple):
    """What an iteration gave."""

    iteration: int
    loss: float
    """The mean over the iteration's global batch, in training."""
    metrics: Mapping[str, float]
    """What the evaluation after it gave; empty where there was none."""
    samples: int
    """Consumed up to its end."""
    micro_batches: int
    """How many its global batch has."""
    measured: bool
    """Whether the noise of its gradient was looked at."""


def learn(plan: Plan) -> Iterator[Learned]:
    """Iteration by iteration, from new weights to the plan's last iteration, or the end of its samples where the batch
    adapts.

    Raises:
        EngineError: the model, its data or its partition cannot be used.
        NotFinite: the loss or a gradient is not finite: the plan does not learn.
    """
    stream, train = plan.stream, plan.train
    if stream is None or stream.semantics != LATEST:  # the same numbers for less work; else older ones come again
        plan = replace(plan, recompute=Recompute.none)
    task = task_of(plan)
    check(task)
    samples = task.samples("train", train.samples or train.iterations * plan.global_batch_size)
    training: Training
    if plan.islands is not None:
        training = IslandTraining(plan, task, samples)
    elif stream is None:
        training = FlushedTraining(plan, task, samples)
    else:
        require_untied(task, plan)
        training = DelayedTraining(plan, task, samples)
    held_out = None if train.eval_interval is None else _held_out(plan, task)
    batches = Batches(plan) if isinstance(training, DelayedTraining) else training.batches
    for iteration in range(1, train.iterations + 1):
        count, measured = batches.count, batches.measures(iteration)
        loss = training.step(iteration)
        if isinstance(training, DelayedTraining):
            batches.after(iteration, None)
        last = batches.over or iteration == train.iterations
        metrics: Mapping[str, float] = {}
        if held_out is not None and (iteration % (train.eval_interval or 1) == 0 or last):
            with training.evaluating():
                size, cpu = plan.micro_batch_size, torch.device("cpu")
                metrics = evaluate_whole(task, *held_out, size, training.forward, cpu)
        yield Learned(iteration, loss, metrics, batches.consumed, count, measured)
        if last:
            return


def _held_out(plan: Plan, task: Task) -> Tuple[Samples, int]:
    count = samples_to_evaluate(plan, task)
    if rest := count % plan.micro_batch_size:
        task.wires_at(rest)
    return task.samples(SPLIT, count), count
