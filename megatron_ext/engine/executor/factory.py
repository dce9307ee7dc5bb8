"""Makes what runs a rank's passes, for micro-batches of any size: its chunks, their messages, an executor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable, List, Optional, Sequence, Type

import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.engine.executor.executor import LOSS, Chunk, Executor, Sizes
from megatron_ext.engine.executor.gathering import BlockWeights
from megatron_ext.engine.executor.messages import Channels, Message, message_of
from megatron_ext.engine.executor.pace import Pace
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import Part
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import DTYPES, Micro, Task, Tensors
from megatron_ext.timeline.recorder import Recorder


@dataclass(eq=False)
class ExecutorFactory:
    """Makes executors and chunks for one rank."""

    _plan: Plan
    _task: Task
    _parts: Sequence[Part]
    """All virtual stages' parts."""
    _virtual_stages: Sequence[int]
    """The numbers of the rank's own."""
    _tensor: TensorGroup
    _peers: Channels
    _loss: Callable[[Tensors, Micro], Tensor]
    _kind: Type[Executor]
    weights: Optional[BlockWeights] = None
    """What has the weights of blocks where replicas keep a share of them."""

    def __post_init__(self) -> None:
        self._device = torch.device(self._plan.device)

    def executor(self, stages: Sequence[Stage], size: int, recorder: Recorder, later: WeightGradients) -> Executor:
        """Makes one for micro-batches of `size` samples; `stages` are the rank's own, or copies of them."""
        pace = Pace(self._device, self._plan.train.comm_timeout_s)
        executor = self._kind(self.chunks_of(stages, size), self._peers, later, recorder, self._loss, pace)
        executor.weights = self.weights
        return executor

    def chunks_of(self, stages: Sequence[Stage], size: int) -> Callable[..., List[Chunk]]:
        """What gives the chunks for micro-batches of `size` samples, or for one of them that has `sizes` of its own."""
        return partial(self._chunks, stages, size)

    def _chunks(self, stages: Sequence[Stage], size: int, sizes: Sizes = ()) -> List[Chunk]:
        return [
            Chunk(
                stage,
                self._message(self._parts[virtual].enters, virtual - 1, size, sizes, virtual - 1),
                self._message(self._parts[virtual].leaves if not stage.last else (), virtual + 1, size, sizes, virtual),
            )
            for stage, virtual in zip(stages, self._virtual_stages)
        ]

    def _message(self, wires: Sequence[str], other: int, size: int, sizes: Sizes, cut: int) -> Message:
        """Returns the message to or from the virtual stage `other`, over the cut behind the virtual stage `cut`."""
        plan = self._plan
        other_tensor = plan.layout.tensors[other % plan.pipeline]
        whole = plan.sequence_parallel and other_tensor != self._tensor.size
        alike = other_tensor == self._tensor.size > 1 and not plan.sequence_parallel
        scattered = alike and cut % plan.pipeline in (plan.scattered_cuts or ())
        dtype, fixed_for = DTYPES[plan.train.precision], plan.micro_batch_size
        return message_of(
            *(self._task, wires, size, self._tensor, dtype, self._device, whole, fixed_for, sizes, plan.compress),
            scattered=scattered,
        )

    def pass_once(self, stages: Sequence[Stage], size: int, *, with_gradients: bool) -> None:
        """Passes an example through each chunk, with zeros in the place of messages: what works at its first call does
        it here. `with_gradients`, backward as well, from gradients that are zero; else as an evaluation does.

        torch tunes a kernel of the loss at its first call, in a buffer as large as the GPU's cache. So the loss is
        first taken when nothing is kept for a backward pass: no memory is needed here that training does not need.
        """
        micro = self._task.example(size, torch.Generator()).to(self._device)
        for chunk in self._chunks(stages, size):
            entered = chunk.entering.unpack([torch.zeros_like(like) for like in chunk.entering.likes])
            if with_gradients:
                for content in chunk.entering.contents:
                    entered[content.name].requires_grad_(content.gradient)
            values = {**entered, **{name: micro.inputs[name] for name in chunk.stage.inputs}}
            if with_gradients and chunk.stage.last and self._device.type == "cuda":
                self._pass(chunk, values, micro, with_gradients, alone=True)
                torch.cuda.empty_cache()  # for the same blocks as in training
            self._pass(chunk, values, micro, with_gradients)
        if self.weights is not None:
            self.weights.end()

    def _pass(self, chunk: Chunk, values: Tensors, micro: Micro, with_gradients: bool, alone: bool = False) -> None:
        """`alone`: gradients go back through the loss only, for which nothing else is kept."""
        left: Tensors = chunk.stage(values)
        if alone:
            left = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in left.items()}
            torch.cuda.empty_cache()  # what was kept cannot serve what torch takes to tune
        if with_gradients:
            left = {LOSS: self._loss(left, micro)} if chunk.stage.last else left
            backward(left, {name: torch.zeros_like(tensor) for name, tensor in left.items()})
