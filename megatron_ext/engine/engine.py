"""The engine of one rank: built from a plan, it makes training steps."""

from __future__ import annotations

import math
from functools import partial
from typing import List, NamedTuple, Optional

import torch
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import BUCKET_BYTES, Place, Plan
from megatron_ext.contract.schedule_check import actions_of
from megatron_ext.contract.schedules import Kind
from megatron_ext.data.gpt_samples import Samples
from megatron_ext.engine.executor import Executor, neighbours, warm_up
from megatron_ext.engine.flat import FlatWeights
from megatron_ext.engine.optimizer import DataGroup, Optimizer
from megatron_ext.engine.pace import Pace
from megatron_ext.engine.precision import DTYPES
from megatron_ext.engine.reduce import GradientReducer
from megatron_ext.parallel.comm import all_reduce
from megatron_ext.parallel.grid import Grid, Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup, shard_of, vocab_cross_entropy
from megatron_ext.tasks.gpt import Stage
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.timeline.progress import Wait, iterates
from megatron_ext.timeline.recorder import Recorder


class StepResult(NamedTuple):
    """What one iteration gave."""

    loss: Optional[float]
    """Mean over the global batch; nan on all but the last stage, None in a rehearsal, which has none."""
    grad_norm: Optional[float]
    """Norm of the whole model's gradient before clipping; None in a rehearsal."""
    loss_scale: float
    skipped: bool
    """Whether an overflow under fp16's loss scale kept the weights as they were."""


class Engine:
    """One rank's stage, optimizer and place in the pipeline."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: Samples, recorder: Recorder) -> None:
        self._plan = plan
        self._place = place
        self._groups = groups
        self._samples = samples
        self._recorder = recorder
        self._device = torch.device(plan.device)
        pipeline = Grid(plan.tensor, plan.data, plan.pipeline).ranks[:, place.dp, place.tp].tolist()
        peers = neighbours(pipeline, place.stage, plan.chunks, groups)
        # Before anything takes its time: ranks wait here for each other, and no longer than for any message.
        warm_up(groups, peers, place.stage, plan.pipeline, self._device)
        self.tensor = TensorGroup(plan.tensor, place.tp, groups.tensor, plan.sequence_parallel, recorder)
        self._stages = [Stage(plan, chunk * plan.pipeline + place.stage, self.tensor) for chunk in range(plan.chunks)]
        named = [pair for stage in self._stages for pair in stage.parameters_by_name()]
        dtype = DTYPES[plan.train.precision]
        self.flat = FlatWeights(named, dtype, self._device, plan.data if plan.sharded_optimizer else 1)
        self._reducer = GradientReducer(self.flat, groups.data, BUCKET_BYTES, recorder)
        self._common = [self.flat.gradient(p) for name, p in named if shard_of(name) is None]
        """Gradients of the weights that every rank of the tensor group has."""
        tied = [stage.tied_word for stage in self._stages if stage.tied_word is not None]
        self._tied = [self.flat.gradient(word) for word in tied]
        """At most one: the first and the last stage are on different ranks where they share the embedding."""
        copies = self._tied if self._stages[-1].last else []
        self.optimizer = Optimizer(
            self.flat,
            plan.train,
            groups.model,
            DataGroup(plan.data, place.dp, groups.data),
            plan.sharded_optimizer,
            copies + (self._common if place.tp > 0 else []),
        )
        self._actions = actions_of(plan)[place.stage]
        later = WeightGradients(self.flat.add)
        splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in self._actions)
        if splits or (self.flat.fused and not plan.train.compile):
            for stage in self._stages:
                stage.put_off(later)
        outside = self.tensor.positions(plan.model.sequence_length)
        self._shape = (plan.micro_batch_size, outside.stop - outside.start, plan.model.hidden)
        self._loss = partial(vocab_cross_entropy, vocab_size=plan.model.vocab_size, tensor=self.tensor)
        self._executor = Executor(
            self._stages,
            peers,
            torch.empty(self._shape, dtype=dtype, device=self._device),
            later,
            recorder,
            self._loss,
            Pace(self._device, plan.train.comm_timeout_s),
        )

    def step(self, iteration: int) -> StepResult:
        """Trains on the global batch of `iteration` (from 1).

        Raises:
            EngineError: the loss or the gradient is not finite, and not because of fp16's loss scale.
            PeerLost: another rank is gone.
        """
        self._recorder.iteration = iteration
        iterates(iteration)
        scale = self.optimizer.scaler.scale
        self._reducer.begin(self._plan.micro_batches)
        loss = self._executor.run(
            self._actions, self._batch(iteration), scale / (self._plan.micro_batches * self._plan.data)
        )
        with Wait("reading the loss"):
            own = 0.0 if loss is None else loss.item()
        if not math.isfinite(own):
            raise _not_finite(iteration, "loss", own / scale)
        self._reduce_gradients()
        mean = math.nan
        if loss is not None:
            all_reduce(loss, self._groups.data, "all-reduce of the loss")
            with Wait("reading the mean loss"):
                mean = loss.item() / scale  # not after the optimizer: a GPU updates weights while the host goes on
        norm = self.optimizer.step(self._recorder)
        skipped = not math.isfinite(norm)
        if skipped and not self.optimizer.scaler.dynamic:
            raise _not_finite(iteration, "gradient's norm", norm)
        return StepResult(mean, norm, scale, skipped)

    def pass_once(self) -> None:
        """Where the first pass takes long, runs each chunk once with gradients that are zero.

        Stages exchange nothing, but the ranks of a tensor group do: all call it when all have their weights.

        torch.compile works at the first call, for minutes: in the first iteration one stage after another would, while
        the others wait for its message. CUDA loads kernels at their first call, and waits there for all that the GPU
        has begun, a receive among it.
        """
        plan, shape = self._plan, self._shape
        if not (plan.train.compile or (self._device.type == "cuda" and plan.pipeline > 1)):
            return
        self._reducer.begin(2)  # it is told of one
        for stage in self._stages:
            if stage.first:
                x = torch.zeros(shape[0], plan.model.sequence_length, dtype=torch.int64, device=self._device)
            else:
                x = torch.zeros(shape, dtype=DTYPES[plan.train.precision], device=self._device, requires_grad=True)
            left = stage(x)
            if stage.last:
                labels = torch.zeros(shape[0], plan.model.sequence_length, dtype=torch.int64, device=self._device)
                left = self._loss(left, labels)
            torch.autograd.backward([left], [torch.zeros_like(left)])

    def _batch(self, iteration: int) -> List[Optional[Tensor]]:
        """This replica's micro-batches, where the stage has a use for them."""
        plan = self._plan
        if not (self._stages[0].first or self._stages[-1].last):
            return [None] * plan.micro_batches
        with self._recorder.span("batch-generator"):
            samples = self._samples.batch(
                iteration, self._place.dp, plan.data, plan.micro_batch_size, plan.global_batch_size
            )
            tokens = torch.from_numpy(samples)
            if self._device.type == "cuda":  # from pinned memory the GPU takes them in its turn, and the host goes on
                tokens = tokens.pin_memory()
            return list(tokens.to(self._device, non_blocking=True))

    def _reduce_gradients(self) -> None:
        """Over the replicas; then what the ranks of a tensor group, or first and last stage, have in common."""
        self._reducer.finish()
        if self._plan.sequence_parallel and self._common:
            with self._recorder.span("layernorm-grads-all-reduce"):
                together = torch.cat([gradient.flatten() for gradient in self._common])
                all_reduce(together, self._groups.tensor, "all-reduce of the norms' gradients")
                sizes = [gradient.numel() for gradient in self._common]
                for gradient, total in zip(self._common, torch.split(together, sizes)):
                    gradient.copy_(total.view_as(gradient))
        for gradient in self._tied:
            with self._recorder.span("embedding-grads-all-reduce"):
                all_reduce(gradient, self._groups.embedding, "all-reduce of the embedding's gradient")


def _not_finite(iteration: int, what: str, value: float) -> EngineError:
    return EngineError(
        f"iteration {iteration}: the {what} is {value}; nothing after it would mean anything. "
        "A smaller train.lr, a longer train.lr_warmup_iterations or a smaller train.clip_grad may help"
    )
