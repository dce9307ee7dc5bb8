"""The engine of one rank where micro-batches stream through the stages (PipeDream): each stage updates by itself.

`megatron_ext.contract.schedule.streams` says what the order of its steps is, and which weights a pass meets.
"""

from __future__ import annotations

import math
from itertools import chain
from itertools import count as counting
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.iteration import exists
from megatron_ext.contract.schedule.schedules import Action, Kind
from megatron_ext.contract.schedule.streams import LATEST, PIPEDREAM, Stream, StreamAction
from megatron_ext.data.samples import Samples
from megatron_ext.engine.engine import FORWARD, Engine
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.engine.results import StepResult, as_numbers, from_numbers, not_finite
from megatron_ext.engine.streams.executor import ScaledExecutor, StageScale, StreamingExecutor, StreamSteps, Versions
from megatron_ext.parallel.comm import all_reduce, annotate_errors
from megatron_ext.tasks.cut import ties
from megatron_ext.tasks.task import DTYPES, Micro, Task, Tensors
from megatron_ext.timeline.progress import Wait, iterates
from megatron_ext.timeline.recorder import NOTHING


class StreamingEngine(Engine):
    """Does what `Engine` does, for a plan with a stream."""

    _executes = StreamingExecutor

    def __init__(self, plan: Plan, task: Task, place: Place, *others: Any) -> None:
        """The arguments are those of `Engine`. Raises EngineError: stages share a parameter, which they would update at
        different times."""
        assert plan.stream is not None
        require_untied(task, plan)
        is_scaled = DTYPES[plan.train.precision] is torch.float16
        if is_scaled:
            self._executes = ScaledExecutor
        super().__init__(plan, task, place, *others)
        self._scale: Optional[StageScale] = None
        if is_scaled:
            assert isinstance(self._executor, ScaledExecutor)
            self._scale = StageScale(self.optimizer.scaler, self.device, (self._groups.tensor, self._groups.data))
            self._executor.scale = self._scale
        self._stream: Stream = plan.stream
        self._versions = Versions(self.flat, self.optimizer)
        self._lr_factor = plan.stream.replicas[place.stage] / plan.stream.replicas[0]
        self._iteration = self.assignment.start.iteration
        self._steps = StreamSteps(plan, place, self._iteration)
        self._under_way: Dict[int, int] = {}
        """For each micro-batch between its passes, the version that it met."""
        self._next = place.dp
        """The micro-batch whose forward pass comes next."""
        self._values: Dict[int, Tensor] = {}
        """Loss and metrics of the last stage's micro-batches."""
        self._factors: Dict[int, Any] = {}
        """The factors of losses and metrics, by micro-batch that the iteration has begun."""
        self._like: Tensors = {}
        """Metrics of a micro-batch."""
        self._logged: Dict[int, List[float]] = {}
        self._gathered: Dict[int, Tensor] = {}
        """For each micro-batch, what running statistics need."""
        self._norm = math.nan

    @property
    def updates(self) -> int:
        return self._iteration

    @property
    def stage_updates(self) -> Optional[int]:
        return int(self.optimizer.updates)

    @property
    def max_forward(self) -> int:
        return max(super().max_forward, 2 * self._plan.world_size)

    @property
    def max_iteration_skew(self) -> int:
        return self._steps.max_iteration_skew

    def soonest_end(self, iteration: int) -> int:
        return self._steps.shorten(iteration)

    def step(self, iteration: int, halves: bool = False) -> StepResult:
        """Goes on until the rank has learned from the global batch of `iteration` (from 1)."""
        assert not halves, "stages learn from one micro-batch after the other"
        self._recorder.iteration = self._iteration = iteration
        iterates(iteration)
        if self._steps.begins(iteration):
            self._next = self._place.dp
        self._await_gradients()
        steps, end = self._steps.of(iteration), self._steps.end(iteration)
        micros = self._begun_in(steps)
        self._factors = {m: _factor(micro) for m, micro in micros.items()}
        assert isinstance(self._executor, StreamingExecutor)
        scale, updates = self.optimizer.scaler.scale, self.optimizer.updates
        self._executor.take(steps, micros, self._factors, self._show, self._passed, self._update)
        if iteration == self._steps.until:
            self._executor.empty()
            self._versions.restart()
        found = [self._logged.pop(m) for m in range(end - self._steps.window, end)] if self._logged else []
        means = [sum(values) / len(values) for values in zip(*found)]
        loss = means[0] if means else math.nan
        metrics, loads = from_numbers(means[1:], self._like) if means else ({}, [])
        skipped = bool(steps) and self.optimizer.updates == updates
        sizes = self.assignment.sizes(self._samples, iteration) if means else ()
        return StepResult(loss, self._norm, scale, skipped, metrics, sizes, loads)

    def forward(
        self, samples: Samples, first: int, size: int, count: int, take: Callable[[Tensors, Micro], None]
    ) -> None:
        place, stages = self._place, self._plan.pipeline
        own = np.arange(place.dp, count, self._stream.replicas[place.stage])
        if not len(own):
            return
        numbers = first + own[:, None] * size + np.arange(size)
        coming = chain.from_iterable(numbers + after * count * size for after in counting(1))
        micros = self._loader.micros(samples, numbers, own.tolist(), coming)
        actions = [Action(kind, m) for m in micros for kind in FORWARD if exists(kind, place.stage, stages)]
        self._executor_of(size).run_forward(actions, micros, take)

    def _begun_in(self, steps: Sequence[StreamAction]) -> Dict[int, Optional[Micro]]:
        """The micro-batches whose forward passes are among these steps."""
        keys = [step.micro_batch for step in steps if step.kind is Kind.FORWARD]
        if not keys:
            return {}
        size = self._plan.micro_batch_size
        first = self.assignment.start.consumed(self._steps.first - 1, self._plan.global_batch_size)
        numbers = first + np.array(keys)[:, None] * size + np.arange(size)
        replicas = self._stream.replicas[self._place.stage]
        coming = (first + m * size + np.arange(size) for m in counting(keys[-1] + replicas, replicas))
        with self._waiting_for_samples() if self._loader.looks_at_samples else NOTHING:
            return self._loader.micros(self._samples, numbers, keys, coming)

    def _show(self, version: int) -> None:
        self._versions.show(self._versions.newest if self._stream.semantics == LATEST else version)
        self._running.begin()
        self._metrics = []

    def _passed(self, step: StreamAction, loss: Optional[Tensor]) -> None:
        m = step.micro_batch
        if step.kind is Kind.BACKWARD:
            del self._under_way[m]
            return
        self._under_way[m] = step.version
        self._next = m + self._stream.replicas[self._place.stage]
        gathered = self._running.gathered()
        if gathered is not None:
            self._gathered[m] = gathered
        if loss is not None:
            own, factor = self._metrics[0][1] if self._metrics else {}, self._factors[m]
            self._like = own
            self._values[m] = torch.cat([loss.detach().float().reshape(1), as_numbers(own).to(loss.device) * factor])

    def _await_gradients(self) -> None:
        """Awaits the gradients of the next update: summed at once where not each replica has as many micro-batches."""
        stage, stream = self._place.stage, self._stream
        learned = stream.learned(stage, self._versions.newest + 1, self._steps.micro_batches)
        is_whole = len(learned) == stream.update_every * stream.replicas[stage]
        self._gradients.begin(stream.update_every, at_once=not is_whole)

    def _update(self, step: StreamAction) -> None:
        """Averages what the replicas learned, and makes the next version of the weights.

        After an overflow that is the one before: so versions have the same numbers on all stages.
        """
        place, stream = self._place, self._stream
        learned = stream.learned(place.stage, step.version, self._steps.micro_batches)
        iteration = self._steps.first + learned[-1] // self._steps.window
        self._gradients.reduce()
        if len(learned) > 1:
            self.flat.grad.mul_(1.0 / len(learned))
        self._log(learned, iteration)
        needed = set() if stream.semantics == LATEST else set(self._under_way.values())
        coming = range(self._next, self._steps.micro_batches, stream.replicas[place.stage])
        if stream.semantics != LATEST:
            needed |= stream.awaited(place.stage, coming, step.version)
        lr = learning_rate(iteration - 1, self._plan.train) * self._lr_factor
        is_own_fault = (lambda: True) if self._scale is None else self._scale.is_own_fault
        self._norm = self._versions.update(needed, lambda: self.optimizer.step(self._recorder, lr, is_own_fault))
        skipped = not math.isfinite(self._norm)
        if skipped and self._scale is None:
            raise not_finite(iteration, "gradient's norm", self._norm)
        if self._scale is not None:
            self._scale.updated()
        gathered = self._running.gathered()
        if gathered is not None:
            own = [self._gathered.pop(m) for m in learned if m in self._gathered]
            total = torch.stack(own).sum(0) if own else torch.zeros_like(gathered)
            self._running.take(total, len(learned), skipped)
        self._await_gradients()

    def _log(self, learned: range, iteration: int) -> None:
        """On the last stage, notes losses and metrics of these micro-batches, whichever replicas had them."""
        if not any(stage.last for stage in self._stages):
            return
        found = {m: self._values.pop(m) for m in learned if m in self._values}
        like = next(iter(found.values()), None)
        width = len(like) if like is not None else 1 + sum(one.numel() for one in self._like.values())
        if len(learned) < self._stream.replicas[self._place.stage]:  # one without any may not know what there is
            widest = torch.tensor([width], device=self.device)
            if self._groups.data is not None:
                with annotate_errors("agreeing on the metrics"):
                    dist.all_reduce(widest, dist.ReduceOp.MAX, self._groups.data)
            width = int(widest.item())
        rows = torch.zeros(len(learned), width, device=self.device)
        for m, values in found.items():
            rows[m - learned.start] = values
        all_reduce(rows, self._groups.data, "all-reduce of the losses")
        with Wait("reading the losses"):
            values_of = rows.tolist()
        for m, values in zip(learned, values_of):
            if not math.isfinite(values[0]):
                raise not_finite(iteration, "loss", values[0])
            self._logged[m] = values


def require_untied(task: Task, plan: Plan) -> None:
    """Raises EngineError if stages share a parameter, which they would update at different times."""
    for owner, stages in ties(task, plan.partition, plan.pipeline):
        raise EngineError(
            f"the stages {', '.join(map(str, stages))} share the parameter {owner}, which they would update at "
            f"different times with parallel.schedule={PIPEDREAM}; use a partition that has both on one stage, or a "
            "schedule that flushes, such as one_f_one_b"
        )


def _factor(micro: Optional[Micro]) -> Any:
    """Returns the factor of a micro-batch's loss, which alone is a mean, or a sum over its weight."""
    if micro is None or micro.weight is None:
        return 1.0
    weight = micro.weight.reshape(()).double()
    return torch.where(weight > 0, 1.0 / weight, 0.0).float()


def make_engine(plan: Plan, *others: Any) -> Engine:
    """A rank's, from what `Engine` takes."""
    return (Engine if plan.stream is None else StreamingEngine)(plan, *others)
