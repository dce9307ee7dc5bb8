"""Delayed gradient descent in one process: what a pipeline without a flush learns, without the pipeline.

Micro-batches are taken one after another, each with the weights that a stage would have had for it. Nothing of the
pipeline's own is used but the model's blocks and the optimizer: no schedule, no messages, no buffers of versions. So
this is what `megatron_ext.engine.streams.streaming` has to be equal to, and a way to see how a model learns under a
plan's delays without its ranks.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.streams import LATEST, TWO, VERTICAL, Stream
from megatron_ext.data.samples import Samples
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.gradients import RunningStatistics
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.engine.results import not_finite
from megatron_ext.engine.streams.executor import last_of_stream
from megatron_ext.learning.flushed import over_cut
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import Part, cut
from megatron_ext.tasks.stage import Stage, evaluation_mode
from megatron_ext.tasks.task import DTYPES, Micro, Task, Tensors
from megatron_ext.timeline.recorder import Recorder


class DelayedStage:
    """A stage of the pipeline, and all versions of its weights that are still to be met."""

    def __init__(self, number: int, plan: Plan, task: Task, part: Part) -> None:
        assert plan.stream is not None
        self._train, self._stream, self._number = plan.train, plan.stream, number
        self.module = Stage(task, part, TensorGroup())
        self.module.initialise(1)
        dtype = DTYPES[plan.train.precision]
        self.module.place(torch.device("cpu"), dtype)
        self._flat = FlatWeights(self.module.parameters_by_name(), dtype, torch.device("cpu"))
        self.optimizer = Optimizer(self._flat, plan.train)
        self._shown = self._flat.weight.clone()
        for name, parameter in self._flat.parameters.items():
            parameter.data = self._flat.view(name, self._shown)
        self._versions = {0: self._flat.weight.clone()}
        self._running = RunningStatistics([self.module], None)
        self._gathered: List[Tensor] = []
        self._learned = 0
        """Micro-batches since the last update."""
        self.blamed = 0.0
        """The largest loss scale with which, since then, a later stage's gradient overflowed before it came here."""

    def begin(self) -> None:
        """A stream: what there is now is version 0."""
        self._versions = {0: self._versions[max(self._versions)]}

    def forward(self, m: int, first_sample: int, entered: Tensors) -> Tensors:
        """Passes micro-batch `m` forward, with the weights that it meets."""
        self._show(self._met(m))
        self.module.begin(first_sample)
        self._running.begin()
        left: Tensors = self.module(entered)
        gathered = self._running.gathered()
        if gathered is not None:
            self._gathered.append(gathered)
        return left

    def before_backward(self, m: int) -> None:
        """Has the backward pass meet what it is to meet, where the forward pass has met older weights."""
        if self._stream.semantics == LATEST:
            self._show(max(self._versions))

    def learn(self, m: int, last: bool, iteration: int) -> None:
        """Notes that the gradient of micro-batch `m` was added, which may be the `last` one; updates where this is due.
        Raises NotFinite: the gradient is not finite."""
        stream, replicas = self._stream, self._stream.replicas[self._number]
        self._learned += 1
        if (m + 1) % (replicas * stream.update_every) and not last:
            return
        self._flat.grad.div_(self._learned)
        lr = learning_rate(iteration - 1, self._train) * replicas / stream.replicas[0]
        norm = self.optimizer.step(Recorder(None), lr, lambda: self.optimizer.scaler.scale >= self.blamed)
        self.blamed = 0.0
        skipped = not math.isfinite(norm)
        if skipped and not self.optimizer.scaler.dynamic:
            raise not_finite(iteration, "gradient's norm", norm)
        if self._gathered and not skipped:
            self._running.take(torch.stack(self._gathered).sum(0), len(self._gathered))
        self._gathered, self._learned = [], 0
        newest = max(self._versions) + 1
        needed = min(self._met(m + 1), newest)
        self._versions = {version: kept for version, kept in self._versions.items() if version >= needed}
        self._versions[newest] = self._flat.weight.clone()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Shows the newest weights, or the average of them where there is one, as after training."""
        with evaluation_mode([self.module]), self.optimizer.averaged():
            self._shown.copy_(self._flat.weight)
            yield

    def state(self) -> Dict[Tuple[str, str, str], Tensor]:
        """What a checkpoint has, by kind, block and name there."""
        found = {
            (kind, block, inner): self._flat.view(name, values).detach().clone()
            for kind, values in self.optimizer.state().items()
            for name, (block, inner) in self.module.places.items()
        }
        for block, inner, kept in self.module.state:
            found["state", block, inner] = kept.detach().clone()
        return found

    def _met(self, m: int) -> int:
        """The version that the forward pass of a micro-batch meets (Narayanan et al. 2019, section 3.3; 2021)."""
        stream, every = self._stream, self._stream.update_every
        stage = 0 if stream.semantics == VERTICAL else self._number
        replicas = stream.replicas[stage]
        if stream.semantics == TWO:
            return max(m // replicas // every - 1, 0)
        updates = max(m // replicas - _in_front(stream, stage), 0) // every
        return updates * replicas // stream.replicas[self._number]

    def _show(self, version: int) -> None:
        """Replaces what is shown, which autograd may keep: a backward pass meets what is there then."""
        self._shown.copy_(self._versions[version])


class DelayedTraining:
    """A plan's training with all its stages in this process; tensor groups count for nothing."""

    def __init__(self, plan: Plan, task: Task, samples: Samples) -> None:
        assert plan.stream is not None
        self._plan = plan
        self._task = task
        self._samples = samples
        self.stages = [DelayedStage(number, plan, task, part) for number, part in enumerate(cut(task, plan.partition))]
        self._first, self._until = 1, 0
        """The first and the last iteration of the stream under way."""

    def step(self, iteration: int) -> float:
        """The loss of the next iteration; a stream begins and ends where those of a run do. Raises NotFinite: the loss
        or a gradient is not finite."""
        if iteration > self._until:
            self._begin(iteration, last_of_stream(self._plan.train, iteration))
        window = self._plan.global_batch_size // self._plan.micro_batch_size
        begun = (iteration - self._first) * window
        return float(np.mean([self._take(m, iteration) for m in range(begun, begun + window)]))

    def stream(self, first: int, until: int) -> List[float]:
        """The losses of these iterations, the pipeline being empty before the first and after the last one."""
        self._begin(first, until)
        return [self.step(iteration) for iteration in range(first, until + 1)]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has `forward` give what an evaluation of the run takes, between two streams."""
        with ExitStack() as entered, torch.random.fork_rng([]), torch.no_grad():
            for stage in self.stages:
                entered.enter_context(stage.evaluating())
            yield

    def forward(self, micro: Micro) -> Tensors:
        """What leaves the last stage, while evaluating."""
        wires: Tensors = {}
        for stage in self.stages:
            stage.module.begin(micro.first)
            wires = stage.module({**wires, **{name: micro.inputs[name] for name in stage.module.inputs}})
            if stage is not self.stages[-1] and self._plan.compress is not None:
                wires = over_cut(wires, self._task)
        return wires

    @staticmethod
    def _cut_behind(stage: DelayedStage, wires: Tensors, sender: List[float]) -> Tensors:
        """The same wires, whose gradients get the loss scale of the stage before the cut. `sender` holds the scale of
        the gradients that come next in a backward pass; once these are not finite, of the stage that overflowed."""

        def rescaled(gradients: Tuple[Tensor, ...]) -> List[Tensor]:
            own, theirs = stage.optimizer.scaler.scale, sender[0]
            if all(torch.isfinite(gradient).all() for gradient in gradients):
                sender[0] = own
            else:
                stage.blamed = max(stage.blamed, theirs)
            factor = torch.tensor(own) / torch.tensor(theirs)
            return [(gradient.float() * factor).to(gradient.dtype) for gradient in gradients]

        names = [name for name, tensor in wires.items() if tensor.requires_grad]
        cut_off: Tuple[Tensor, ...] = _Cut.apply(  # type: ignore[no-untyped-call]
            rescaled, *[wires[name] for name in names]
        )
        return {**wires, **dict(zip(names, cut_off))}

    def state(self) -> Dict[Tuple[str, str, str], Tensor]:
        """What a checkpoint has, by kind, block and name there."""
        return {name: value for stage in self.stages for name, value in stage.state().items()}

    def _begin(self, first: int, until: int) -> None:
        self._first, self._until = first, until
        for stage in self.stages:
            stage.begin()

    def _take(self, m: int, iteration: int) -> float:
        """The loss of micro-batch `m` of the stream, from which all stages learn."""
        plan = self._plan
        window = plan.global_batch_size // plan.micro_batch_size
        last = m == (self._until - self._first + 1) * window - 1
        sample = (self._first - 1) * plan.global_batch_size + m * plan.micro_batch_size
        micro = self._task.micro_of(self._samples, np.arange(sample, sample + plan.micro_batch_size))
        wires: Tensors = {}
        sender, scaled = [self.stages[-1].optimizer.scaler.scale], self.stages[-1].optimizer.scaler.dynamic
        for stage in self.stages:
            inputs = {name: micro.inputs[name] for name in stage.module.inputs}
            wires = stage.forward(m, sample, {**wires, **inputs})
            if stage is not self.stages[-1] and scaled:
                wires = self._cut_behind(stage, wires, sender)
            if stage is not self.stages[-1] and plan.compress is not None:
                wires = over_cut(wires, self._task)
        loss = self._task.loss(wires, micro, TensorGroup())
        if micro.weight is not None:
            loss = loss / micro.weight.clamp(min=1e-30)
        if not math.isfinite(loss.item()):
            raise not_finite(iteration, "loss", loss.item())
        for stage in self.stages:
            stage.before_backward(m)
        loss.backward(torch.full_like(loss, sender[0]))  # type: ignore[no-untyped-call]
        for stage in self.stages:
            stage.learn(m, last, iteration)
        return loss.item()


class _Cut(torch.autograd.Function):
    """Tensors as they are, whose gradients a function changes together."""

    @staticmethod
    def forward(ctx: Any, change: Any, *tensors: Tensor) -> Tuple[Tensor, ...]:
        ctx.change = change
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.change(gradients)


def _in_front(stream: Stream, stage: int) -> int:
    """Micro-batches of a replica that are under way when it takes another one, in a full pipeline."""
    if stream.depth is not None:
        return stream.depth[stage]
    ranks_before = sum(stream.replicas[:stage])
    return (sum(stream.replicas) - 1 - ranks_before) // stream.replicas[stage]
