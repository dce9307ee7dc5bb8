"""The engine of one rank: built from a plan, it makes training steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megatron_ext.comm import all_reduce
from megatron_ext.errors import EngineError
from megatron_ext.executor import Executor
from megatron_ext.flat import FlatWeights, GradientReducer
from megatron_ext.gpt_data import GptSamples
from megatron_ext.grid import Grid, Groups
from megatron_ext.model import Stage
from megatron_ext.optimizer import Optimizer
from megatron_ext.plan import Place, Plan
from megatron_ext.schedule import actions
from megatron_ext.timeline import Recorder

BUCKET_BYTES = 16 * 2**20
"""Gradients all-reduced in one message: large enough for bandwidth, small enough to overlap."""


class StepResult(NamedTuple):
    """What one iteration gave."""

    loss: float
    """Mean over the global batch; nan on all but the last stage."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping."""


class Engine:
    """One rank's stage, optimizer and place in the pipeline."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: GptSamples, recorder: Recorder) -> None:
        self._plan = plan
        self._place = place
        self._groups = groups
        self._samples = samples
        self._recorder = recorder
        self._device = torch.device(plan.device)
        self.stage = Stage(plan, place.stage).to(self._device)
        self.flat = FlatWeights(self.stage.parameters_by_name())
        self._reducer = GradientReducer(self.flat, groups.data, BUCKET_BYTES)
        self.optimizer = Optimizer(
            self.flat, plan.train, groups.pipeline, self.stage.tied_word if self.stage.last else None
        )
        pipeline = Grid(plan.tensor, plan.data, plan.pipeline).ranks[:, place.dp, place.tp].tolist()
        self._executor = Executor(
            self.stage,
            pipeline[place.stage - 1] if not self.stage.first else None,
            pipeline[place.stage + 1] if not self.stage.last else None,
            (plan.micro_batch_size, plan.model.sequence_length, plan.model.hidden),
            self._device,
            recorder,
        )
        self._actions = actions(plan.schedule, place.stage, plan.pipeline, plan.micro_batches)

    def step(self, iteration: int) -> StepResult:
        """Trains on the global batch of `iteration` (from 1).

        Raises:
            EngineError: the loss is not finite.
            PeerLost: another rank is gone.
        """
        self._recorder.iteration = iteration
        with self._recorder.span("batch-generator"):
            batch = self._samples.batch(
                iteration, self._place.dp, self._plan.data, self._plan.micro_batch_size, self._plan.global_batch_size
            )
            micro_batches = torch.from_numpy(batch).to(self._device)
        loss = self._executor.run(
            self._actions, list(micro_batches), 1.0 / (self._plan.micro_batches * self._plan.data), self._reducer.arm
        )
        self._reduce_gradients()
        norm = self.optimizer.step(iteration - 1, self._recorder)
        if loss is None:
            return StepResult(math.nan, norm)
        all_reduce(loss, self._groups.data, "all-reduce of the loss")
        if not math.isfinite(loss.item()):
            raise EngineError(
                f"iteration {iteration}: the loss is {loss.item()}; nothing after it would mean anything. "
                "A smaller train.lr, a longer train.lr_warmup_iterations or a smaller train.clip_grad may help"
            )
        return StepResult(loss.item(), norm)

    def _reduce_gradients(self) -> None:
        """First over the replicas, then, for the tied embedding, over first and last stage."""
        if self._groups.data is not None:
            with self._recorder.span("grads-all-reduce"):
                self._reducer.finish()
        tied = self.stage.tied_word
        if tied is not None:
            assert tied.grad is not None
            with self._recorder.span("embedding-grads-all-reduce"):
                all_reduce(tied.grad, self._groups.embedding, "all-reduce of the embedding's gradient")
