"""A rank's steps where micro-batches stream through the stages, an iteration at a time; and what takes them.

An iteration is a global batch of micro-batches, in which nothing waits for its end: a rank's part of it goes to the
update that learns from the last of them. A stream is empty where all ranks need the same weights: when they are saved
or evaluated, and at the end.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Callable, Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.contract.schedule.streams import StreamAction
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.engine.executor.executor import LOSS, Executor, Key
from megatron_ext.engine.executor.messages import Content
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import Optimizer
from megatron_ext.engine.optimizer.precision import LossScaler
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.tasks.task import Micro, Tensors
from megatron_ext.timeline.progress import Wait


def last_of_stream(train: TrainConfig, iteration: int) -> int:
    """The next iteration, from this one on, after which the pipeline is empty."""
    intervals = [train.eval_interval, train.save_interval if train.checkpoint else None, train.save_memory]
    ends = [-(-iteration // every) * every for every in intervals if every]
    return min([train.iterations, *ends])


class StreamSteps:
    """Gives the steps of one rank in the stream under way."""

    def __init__(self, plan: Plan, place: Place, last: int) -> None:
        """The pipeline is empty after the iteration `last`."""
        assert plan.stream is not None
        self.stream = plan.stream
        self._train = plan.train
        self._place = place
        self.window = plan.global_batch_size // plan.micro_batch_size
        """Micro-batches of an iteration."""
        self.first, self.until = last + 1, last
        """The stream's first and last iteration."""
        self._steps: Iterator[StreamAction] = iter(())
        self._taken = 0
        self._learned = 0
        """Micro-batches of the stream that the updates taken so far have learned from."""

    @property
    def micro_batches(self) -> int:
        """How many the stream has."""
        return (self.until - self.first + 1) * self.window

    @property
    def max_iteration_skew(self) -> int:
        """The most iterations that ranks may be apart, at least 1."""
        return -(-self.stream.in_flight // self.window) + 1

    def begins(self, iteration: int) -> bool:
        """Whether a stream begins with an iteration, which then is the one under way."""
        if iteration <= self.until:
            return False
        self.first, self.until = iteration, last_of_stream(self._train, iteration)
        self._steps, self._taken, self._learned = self._all(), 0, 0
        return True

    def of(self, iteration: int) -> List[StreamAction]:
        """The steps of the next iteration; none where an update before it has learned from all of its micro-batches.

        So no rank is further than in_flight micro-batches.
        """
        end = self.end(iteration)
        found: List[StreamAction] = []
        while self._learned < end and (step := next(self._steps, None)) is not None:
            found.append(step)
            if step.kind is Kind.UPDATE:
                self._learned = step.micro_batch + 1
        self._taken += len(found)
        return found

    def end(self, iteration: int) -> int:
        """The stream's micro-batches up to the end of an iteration."""
        return (iteration - self.first + 1) * self.window

    def shorten(self, iteration: int) -> int:
        """Ends the stream as soon after an iteration as all ranks can: before what any has begun; where that is."""
        if iteration + self.max_iteration_skew < self.until:
            self.until = iteration + self.max_iteration_skew
            self._steps = islice(self._all(), self._taken, None)
        return max(iteration, self.until)

    def _all(self) -> Iterator[StreamAction]:
        return self.stream.steps(self._place.stage, self._place.dp, self.micro_batches)


SCALE = Content("loss scale", (2,), torch.float16, True)
"""A number in fp32, bit by bit: so that it goes with the gradients, in one message."""


class StageScale:
    """Keeps the loss scale of this rank's stage. On a GPU, nothing of a pass makes the host wait."""

    def __init__(self, scaler: LossScaler, device: torch.device, groups: Sequence[Optional[dist.ProcessGroup]]) -> None:
        """`groups` together have all ranks of the stage."""
        self._scaler = scaler
        self._groups = groups
        self._device = device
        self._blamed = torch.zeros((), device=device)
        """The largest scale of the gradients since the last update that were not finite when they arrived, with which a
        stage overflowed; 0 without any."""

    def entering(self, left: Tensors, received: Tensors) -> Tuple[Tensors, Tensor]:
        """The gradients with which the backward pass begins, from those received; and what is sent on as `SCALE`: the
        scale of this stage, or of the later one whose gradients are not finite."""
        own = torch.full((), self._scaler.scale, device=self._device)
        if SCALE.name not in received:
            return {LOSS: torch.full_like(left[LOSS], self._scaler.scale)}, _bits(own)
        sent = received[SCALE.name].clone().view(torch.float32)[0]
        gradients = {name: gradient for name, gradient in received.items() if name != SCALE.name}
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for gradient in gradients.values():
            finite = finite & torch.isfinite(gradient).all()
        self._blamed = torch.maximum(self._blamed, torch.where(finite, torch.zeros_like(sent), sent))
        scaled = {name: (gradient.float() * (own / sent)).to(gradient.dtype) for name, gradient in gradients.items()}
        return scaled, _bits(torch.where(finite, own, sent))

    def is_own_fault(self) -> bool:
        """Whether this stage's scale is to blame for the gradient of an update, which is not finite; all ranks of the
        stage ask."""
        for group in self._groups:
            if group is not None:
                with annotate_errors("agreeing on whose loss scale was too large"):
                    dist.all_reduce(self._blamed, dist.ReduceOp.MAX, group)
        with Wait("reading whose loss scale was too large"):
            return self._scaler.scale >= float(self._blamed)

    def updated(self) -> None:
        """The gradients that come next are for another update."""
        self._blamed = torch.zeros_like(self._blamed)


def _bits(scale: Tensor) -> Tensor:
    return scale.reshape(1).view(torch.float16)


class StreamingExecutor(Executor):
    """Takes a rank's steps, as the executor of a schedule takes its actions."""

    def take(
        self,
        steps: Sequence[StreamAction],
        micro_batches: Mapping[int, Optional[Micro]],
        factors: Mapping[int, Any],
        show: Callable[[int], None],
        passed: Callable[[StreamAction, Optional[Tensor]], None],
        update: Callable[[StreamAction], None],
    ) -> None:
        """Micro-batches, and the factors of their losses, are by number. Before a pass `show` is given the version of
        the weights that it meets; after it, `passed` is given its loss, if there is one."""
        self._expect(steps, micro_batches)
        for step in steps:
            kind, m, chunk = step.action
            key = m, chunk
            self._recorder.micro_batch, self._recorder.chunk = key
            if kind is Kind.FORWARD:
                show(step.version)
                self._forward(key, micro_batches[m], factors[m])
                passed(step, self._losses.pop() if self._losses else None)
            elif kind is Kind.BACKWARD:
                show(step.version)
                self._backward(kind, key)
                passed(step, None)
            elif kind is Kind.UPDATE:
                update(step)
            else:
                self._exchange(kind, key)

    def empty(self) -> None:
        """Waits until all was sent."""
        self._flush()


class ScaledExecutor(StreamingExecutor):
    """Takes steps in fp16, where each stage has a loss scale of its own."""

    _sent_with_gradients = (SCALE,)
    scale: StageScale

    def _backward(self, kind: Kind, key: Key) -> None:
        received = self._gradients_left.pop(key, {})
        self._gradients_left[key], sent = self.scale.entering(self._left[key], received)
        super()._backward(kind, key)
        if key in self._gradients_entered:
            self._gradients_entered[key][SCALE.name] = sent


class Versions:
    """Version v is what the rank has after its v-th update since the pipeline was empty.

    The model's parameters are views of one version at a time. Autograd keeps parameters themselves, and looks at them
    in the backward pass: so that pass, too, begins by showing its version, which then is what the forward pass had.
    """

    def __init__(self, flat: FlatWeights, optimizer: Optimizer) -> None:
        self._flat = flat
        self._optimizer = optimizer
        self._held: Dict[int, Tensor] = {0: flat.weight}
        self._free: List[Tensor] = []
        self._shown = 0
        self.newest = 0
        self.most = 1
        """Held at once so far."""

    def show(self, version: int) -> None:
        """Has the model's parameters be of this version."""
        if version != self._shown:
            weight = self._held[version]
            for name, parameter in self._flat.parameters.items():
                parameter.data = self._flat.view(name, weight)
            self._shown = version

    def update(self, needed: Collection[int], step: Callable[[], float]) -> float:
        """Makes the next version: `step` changes the newest one, in a buffer of its own if passes still need that.

        All other versions that are not `needed` are let go. Returns what `step` does.
        """
        for version in [one for one in self._held if one not in needed and one != self.newest]:
            self._free.append(self._held.pop(version))
        before = self._held[self.newest]
        if self.newest in needed:
            self._optimizer.move(self._free.pop() if self._free else torch.empty_like(before))
        else:
            del self._held[self.newest]
        found = step()
        self.newest += 1
        self._held[self.newest] = self._flat.weight
        self.most = max(self.most, len(self._held))
        if self._shown not in self._held:
            self._shown = -1  # whose buffer is another one's now
        return found

    def restart(self) -> None:
        """Keeps only the newest version, as version 0, when the pipeline is empty."""
        self.show(self.newest)
        for version in [one for one in self._held if one != self.newest]:
            self._free.append(self._held.pop(version))
        self._held = {0: self._held[self.newest]}
        self._shown = self.newest = 0
