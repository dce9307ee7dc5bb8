"""One rank of the same training run, by our engine and by others: what `benchmarks.engine` compares.

Here are our engine, and others who run the pipeline but have our weights, data, all-reduces, clipping and Adam, the
same code on the same flat buffers. `benchmarks.plain_pipelining` has only our samples and learning rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.data.samples import BEGINNING, Samples
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.optimizer.optimizer import DataGroup, Optimizer
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.parallel.comm import all_reduce
from megatron_ext.parallel.cross_entropy import vocab_cross_entropy
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Tensors
from megatron_ext.timeline.event_files import EventBuffer
from megatron_ext.timeline.recorder import NOTHING, Recorder


class Contender(Protocol):
    """One rank of a run."""

    recorder: Switch

    def step(self, iteration: int) -> float:
        """Trains one iteration (from 1). The mean loss on the last stage, nan elsewhere."""


class Switch(Recorder):
    """A recorder that can be turned off, so that not even the clock is read."""

    def __init__(self, buffer: EventBuffer | None) -> None:
        super().__init__(buffer)
        self.on = False

    def span(self, name: str, micro_batch: int = -1, peer: int = -1, chunk: int = 0) -> AbstractContextManager[None]:
        return super().span(name, micro_batch, peer, chunk) if self.on else NOTHING


class Tdpp:
    """Our engine."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: Samples, recorder: Switch) -> None:
        self.recorder = recorder
        self._engine = Engine(plan, task_of(plan), place, groups, samples, recorder)

    def step(self, iteration: int) -> float:
        loss = self._engine.step(iteration).loss
        assert loss is not None
        return loss


class Yardstick(ABC):
    """A run whose pipeline somebody else runs."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: Samples, recorder: Switch) -> None:
        self.recorder = recorder
        self.plan = plan
        self.place = place
        self._groups = groups
        self._samples = samples
        self.first, self.last = place.stage == 0, place.stage == plan.pipeline - 1
        named, word = self.build(groups)
        self._flat = FlatWeights(named, torch.float32, torch.device("cpu"))
        self._tied = [] if word is None else [self._flat.gradient(word)]
        data = DataGroup(plan.data, place.dp, groups.data)
        counted_elsewhere = [] if word is None or not self.last else [self._flat.where(word)]
        self._optimizer = Optimizer(self._flat, plan.train, groups.model, data, False, counted_elsewhere)

    @abstractmethod
    def build(self, groups: Groups) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None]:
        """Makes the stage. Its parameters, and the word embedding where it is shared with another stage."""

    @abstractmethod
    def forward_backward(self, tokens: Tensor | None) -> list[Tensor]:
        """One pass of the pipeline: the last stage's losses, each divided by `losses`.

        tokens [micro-batches, micro-batch, sequence + 1] on the first and the last stage.
        """

    @property
    def losses(self) -> int:
        """Losses in an iteration, of which the mean is minimised."""
        return sum(self.plan.micro_batches)

    def step(self, iteration: int) -> float:
        losses = self.forward_backward(self._batch(iteration) if self.first or self.last else None)
        all_reduce(self._flat.grad, self._groups.data, "gradients")
        for gradient in self._tied:
            all_reduce(gradient, self._groups.tied[0][0].group, "embedding's gradient")
        self._optimizer.step(self.recorder)
        if not self.last:
            return float("nan")
        loss = torch.stack(losses).sum()
        all_reduce(loss, self._groups.data, "loss")
        return loss.item()

    def _batch(self, iteration: int) -> Tensor:
        plan = self.plan
        taken = np.array(plan.taken_by(self.place.stage, self.place.dp))
        own = BEGINNING.share(iteration, taken, plan.global_batch_size, plan.micro_batch_size)
        samples = self._samples.batch(own)
        return torch.from_numpy(samples["tokens"])


class OneTensor(nn.Module):
    """A stage that takes and gives one tensor, as torch's pipelining wants it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        (entered,) = (*self.stage.part.inputs, *self.stage.part.enters)
        left: Tensors = self.stage({entered: x})
        return left[self.stage.part.leaves[0]]


def shared_word(named: list[tuple[str, nn.Parameter]], plan: Plan) -> nn.Parameter | None:
    """The word embedding, where another stage has it, too."""
    if plan.model.untie_embeddings_and_output_weights:
        return None
    words = [parameter for name, parameter in named if name.endswith(".word")]
    return words[0] if words and plan.pipeline > 1 else None


class Pipelining(Yardstick):
    """torch.distributed.pipelining: our stages under its 1F1B."""

    def build(self, groups: Groups) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        plan, tensor = self.plan, TensorGroup()
        stage = stage_of(plan, self.place.stage, tensor)
        self._schedule = Schedule1F1B(
            PipelineStage(OneTensor(stage), self.place.stage, plan.pipeline, torch.device("cpu"), group=groups.forward),
            plan.micro_batches[0],
            lambda logits, labels: vocab_cross_entropy(logits, labels, plan.model.vocab_size, tensor) / self.losses,
            scale_grads=False,
        )
        named = stage.parameters_by_name()
        return named, shared_word(named, plan)

    def forward_backward(self, tokens: Tensor | None) -> list[Tensor]:
        losses: list[Tensor] = []
        whole = None if tokens is None else tokens.flatten(0, 1)
        inputs = [whole[:, :-1]] if self.first and whole is not None else []
        labels = whole[:, 1:] if self.last and whole is not None else None
        self._schedule.step(*inputs, target=labels, losses=losses if self.last else None, return_outputs=False)
        return [loss.detach() for loss in losses]
