"""What every plan learns whose iterations flush: all its layouts sum the same gradients, as one rank does."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.contract.adaptive.controller import Controller
from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import ISLAND
from megatron_ext.data.samples import Position, Samples
from megatron_ext.engine.executor.messages import quantised, restored
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.gradients import HalfGradients, RunningStatistics
from megatron_ext.engine.optimizer.learning_rate import rate_of
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.engine.results import not_finite
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut, cut_between
from megatron_ext.tasks.stage import Stage, evaluation_mode
from megatron_ext.tasks.task import DTYPES, Micro, Task, Tensors
from megatron_ext.timeline.recorder import Recorder

if TYPE_CHECKING:
    from numpy.typing import NDArray


def over_cut(left: Tensors, task: Task) -> Tensors:
    """Returns what the next stage receives of what has left one; gradients are rounded on their way back.

    Tensors of one number format are rounded together, in their order, as they are sent.
    """
    known = task.wires
    together: Dict[torch.dtype, List[str]] = {}
    for name, tensor in left.items():
        if known[name].gradient and not known[name].exact:
            together.setdefault(tensor.dtype, []).append(name)
    found = dict(left)
    for names in together.values():
        flat: Tensor = _Rounded.apply(  # type: ignore[no-untyped-call]
            torch.cat([left[name].flatten() for name in names])
        )
        parts = torch.split(flat, [left[name].numel() for name in names])
        found.update((name, part.view(left[name].shape)) for name, part in zip(names, parts))
    return found


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return restored(quantised(numbers), numbers.numel(), numbers.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return restored(quantised(gradient), gradient.numel(), gradient.dtype)


class Batches:
    """Decides the global batches of a training, as a run does: all of one size where the plan's batch does not
    adapt."""

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
        """How many the next iteration has."""
        return self.count * self._size

    @property
    def over(self) -> bool:
        """Whether fewer samples are left than a batch has at least."""
        return self._controller is not None and self._left < self._controller.least_samples

    def measures(self, iteration: int) -> bool:
        """Whether the gradients of the halves are to be looked at in this iteration."""
        return self._adapt is not None and self._adapt.due(iteration)

    def after(self, iteration: int, halves: Optional[Halves]) -> None:
        """Decides about the next iteration, after one whose `halves` were measured if it was to measure."""
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


class FlushedTraining:
    """A plan's training with the whole model in this process; how it is laid out counts for nothing, but for the cuts
    where messages are rounded (`parallel.compress`)."""

    def __init__(
        self, plan: Plan, task: Task, samples: Samples, micro_batches: Optional[NDArray[np.int64]] = None
    ) -> None:
        """`micro_batches` are the numbers of those of each global batch that it takes; None: all."""
        self._plan = plan
        self._taken = micro_batches
        self._task = task
        self._samples = samples
        parts = cut_between(task, [task.blocks]) if plan.compress is None else cut(task, plan.partition)
        owned: Dict[str, nn.Parameter] = {}
        self._stages = [Stage(task, part, TensorGroup(), owned) for part in parts]
        dtype, cpu = DTYPES[plan.train.precision], torch.device("cpu")
        for stage in self._stages:
            stage.initialise(1)
            stage.place(cpu, dtype)
        flat = FlatWeights([named for stage in self._stages for named in stage.parameters_by_name()], dtype, cpu)
        self._optimizer = Optimizer(flat, plan.train)
        self._flat = flat
        self.batches = Batches(plan)
        self._running = RunningStatistics(self._stages, None)

    def step(self, iteration: int) -> float:
        """The loss of the next iteration. Raises NotFinite: the loss or the gradient is not finite, and not because of
        fp16's loss scale."""
        plan, scaler, batches = self._plan, self._optimizer.scaler, self.batches
        scale, count = scaler.scale, batches.count
        start = Position(iteration - 1, batches.consumed)
        numbers = np.arange(count) if self._taken is None else self._taken
        rows = start.share(iteration, numbers, batches.samples, plan.micro_batch_size)
        micros = [self._task.micro_of(self._samples, row) for row in rows]
        factor = scale / self._weight(micros)
        self._running.begin()
        halves = None
        if batches.measures(iteration):
            loss, halves = self._in_halves(micros, factor, scale)
        else:
            loss = self._pass(micros, factor)
        if not math.isfinite(loss):
            raise not_finite(iteration, "loss", loss / scale)
        rate = rate_of(plan, iteration - 1, batches.consumed, batches.samples) if plan.adapt is not None else None
        norm = self._optimizer.step(Recorder(None), rate)
        skipped = not math.isfinite(norm)
        if skipped and not scaler.dynamic:
            raise not_finite(iteration, "gradient's norm", norm)
        self._running.finish(len(rows), skipped)
        batches.after(iteration, halves)
        return loss / scale

    def _pass(self, micros: Sequence[Micro], factor: float) -> float:
        """The loss of micro-batches, whose gradients are added up."""
        loss = 0.0
        for micro in micros:
            of_micro = self._task.loss(self.forward(micro), micro, TensorGroup()) * factor
            of_micro.backward()  # type: ignore[no-untyped-call]
            loss += float(of_micro.detach())
        return loss

    def _in_halves(self, micros: Sequence[Micro], factor: float, scale: float) -> Tuple[float, Halves]:
        """The same, with the gradients of the even ones beside that of all, without the loss scale."""
        gradients = HalfGradients(self._flat, [], None, 1)
        loss = self._pass(micros[::2], factor)
        gradients.keep()
        loss += self._pass(micros[1::2], factor)
        even, whole, product = (value / scale**2 for value in gradients.compared(lambda: None))
        sizes = len(micros[::2]) * self._plan.micro_batch_size, len(micros[1::2]) * self._plan.micro_batch_size
        part = sizes[0] / sum(sizes)
        if any(micro.weight is not None for micro in micros):
            part = self._weight(micros[::2]) / self._weight(micros)
        return loss, Halves(even, whole, product, part, *sizes)

    @property
    def weights(self) -> Tensor:
        """Return the weights that it steps, fp32 and flat."""
        return self._optimizer.state([ISLAND])[ISLAND]

    def meet(self, mean: Tensor) -> None:
        """Takes the common step of islands, whose weights have this mean."""

        def average(flat: Tensor) -> None:
            flat.copy_(mean)

        self._optimizer.step_outer(Recorder(None), 1.0, average)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has `forward` give what an evaluation of the run takes, between two iterations."""
        with evaluation_mode(self._stages), torch.random.fork_rng([]), torch.no_grad(), self._optimizer.averaged():
            yield

    def forward(self, micro: Micro) -> Tensors:
        """What leaves the model."""
        left: Tensors = {}
        for stage in self._stages:
            entered = over_cut(left, self._task) if left else {}
            stage.begin(micro.first)
            left = stage({**entered, **{name: micro.inputs[name] for name in stage.inputs}})
        return left

    def _weight(self, micros: Sequence[Micro]) -> float:
        """Returns by what the losses of micro-batches, which are sums or means, are divided."""
        weights: List[Tensor] = [micro.weight for micro in micros if micro.weight is not None]
        if not weights:
            return float(len(micros))
        total = float(torch.stack([weight.reshape(()).double() for weight in weights]).sum())
        return total if total > 0 else math.inf
