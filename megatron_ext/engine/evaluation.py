"""Evaluates a model on the samples of a split while it trains: forward passes alone, under the plan's own layout."""

from __future__ import annotations

import math
import time
from typing import Callable, Dict, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.goal import SPLIT
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.data.samples import Samples
from megatron_ext.engine.interface import AnyEngine
from megatron_ext.parallel.comm import exchange
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import Micro, Task, Tensors

WEIGHT, LOSS = "weight", "loss"


class Evaluation(NamedTuple):
    """What one gave, the same on all ranks."""

    metrics: Mapping[str, float]
    """`loss` and the task's own, means over all samples."""
    seconds: float


def samples_to_evaluate(plan: Plan, task: Task) -> int:
    """How many samples of the split an evaluation takes: all, or those of `eval_iterations` global batches.

    Raises:
        EngineError: nobody knows how many there are.
        DataError: the split cannot be used.
    """
    whole = task.epoch(SPLIT)
    wanted = plan.train.eval_iterations
    if wanted is None and whole is None:
        raise EngineError(
            f"train.eval_iterations=null evaluates the whole {SPLIT} split, but these data do not say how many samples "
            "it has; give train.eval_iterations, a number of global batches"
        )
    asked = math.inf if wanted is None else wanted * plan.global_batch_size
    return int(min(asked, math.inf if whole is None else whole))


class Tally:
    """What the micro-batches of an evaluation gave so far, summed."""

    def __init__(self, task: Task, tensor: TensorGroup) -> None:
        self._task = task
        self._tensor = tensor
        self._sums: Dict[str, Tensor] = {}

    def take(self, left: Tensors, micro: Micro) -> None:
        """Adds up what a micro-batch gives: of a mean, as often as it has samples."""
        found = {LOSS: self._task.loss(left, micro, self._tensor), **self._task.metrics(left, micro, self._tensor)}
        if micro.weight is None:
            samples = float(len(next(iter({**micro.inputs, **micro.targets}.values()))))
            found = {name: value.double() * samples for name, value in found.items()}
            found[WEIGHT] = torch.full_like(found[LOSS], samples)
        else:
            found[WEIGHT] = micro.weight.reshape(())
        for name, value in found.items():
            value = value.detach().double().reshape(())
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def sums(self) -> Dict[str, float]:
        return {name: value.item() for name, value in self._sums.items()}


def means(task: Task, parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Over all samples, from the sums of all ranks, in their order; with what the task derives from them."""
    total: Dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    weight = total.pop(WEIGHT)
    return task.evaluated({name: value / weight if weight else math.nan for name, value in total.items()})


def evaluate_whole(
    task: Task, samples: Samples, count: int, size: int, forward: Callable[[Micro], Tensors], device: torch.device
) -> Mapping[str, float]:
    """What the first `count` samples give, in micro-batches of `size`, of a model that `forward` passes whole."""
    tally = Tally(task, TensorGroup())
    for first in range(0, count, size):
        micro = task.micro_of(samples, np.arange(first, min(first + size, count))).to(device)
        tally.take(forward(micro), micro)
    return means(task, [tally.sums()])


class Evaluator:
    """All ranks call it together."""

    def __init__(self, plan: Plan, place: Place, engine: AnyEngine, samples: Samples, count: int) -> None:
        """The first `count` of `samples` are evaluated, always the same. Raises EngineError: the last of them make a
        micro-batch that the model does not take."""
        if rest := count % plan.micro_batch_size:
            engine.task.wires_at(rest)
        self._plan = plan
        self._engine = engine
        self._samples = samples
        self._count = count
        self._reports = place.tp == 0

    def evaluate(self) -> Evaluation:
        """Raises PeerLost if another rank is gone."""
        began = time.monotonic()
        size = self._plan.micro_batch_size
        whole, rest = divmod(self._count, size)
        at_once = self._engine.max_forward
        tally = Tally(self._engine.task, self._engine.tensor)
        with self._engine.evaluating():
            for first in range(0, whole, at_once):
                count = min(at_once, whole - first)
                self._engine.forward(self._samples, first * size, size, count, tally.take)
            if rest:
                self._engine.forward(self._samples, whole * size, rest, 1, tally.take)
        own = tally.sums() if self._reports else {}
        device = torch.device(self._plan.device)
        found = means(
            self._engine.task, exchange(own, self._plan.world_size, device, "putting the evaluation together")
        )
        return Evaluation(found, time.monotonic() - began)
