"""What the training loop, evaluations and checkpoints ask of an engine, whichever trains."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import contextmanager
from itertools import chain
from itertools import count as counting
from typing import Any, Callable, ContextManager, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.data.samples import Samples
from megatron_ext.engine.batches import BatchLoader, ReplicaBatches
from megatron_ext.engine.optimizer.learning_rate import rate_of
from megatron_ext.engine.results import Progress, StepResult
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import Micro, Task, Tensors
from megatron_ext.timeline.recorder import NOTHING, Recorder


class AnyEngine(ReplicaBatches):
    """One rank's part of the model, with its optimizer. All ranks call its methods together."""

    _plan: Plan
    _place: Place
    _samples: Samples
    _recorder: Recorder
    _loader: BatchLoader
    device: torch.device
    task: Task
    tensor: TensorGroup
    optimizer: Any
    """With `kinds`, `state`, `load`, `scaler` and `updates` as `megatron_ext.engine.optimizer` has them."""
    flat: Any
    """The optimizer's flat state: `numel`, and `view`, the part that belongs to a parameter."""
    blocks: Sequence[str]
    """The blocks that this rank's stage holds."""
    places: Mapping[str, Tuple[str, str]]
    """For each parameter's name: its block, and its name there. A copy of a tied one has the owner's."""
    waited_s = 0.0
    """Seconds that this rank has waited for the samples of its iterations."""
    state: Sequence[Tuple[str, str, Tensor]]
    """What is not trained, but part of a checkpoint: by block and name there."""

    @abstractmethod
    def step(self, iteration: int, halves: bool = False) -> StepResult:
        """Trains on the global batch of `iteration` (from 1), and looks at the gradients of its `halves` if asked to.

        Raises:
            NotFinite: the loss or the gradient is not finite, and not because of fp16's loss scale.
            PeerLost: another rank is gone.
        """

    @abstractmethod
    def pass_once(self) -> None:
        """Does beforehand what makes a first pass slow. All ranks call it when all have their weights."""

    @abstractmethod
    def forward(
        self, samples: Samples, first: int, size: int, count: int, take: Callable[[Tensors, Micro], None]
    ) -> None:
        """Forward passes of `count` micro-batches of `size` samples from number `first` on, by the plan's schedule.

        `count` is at most `max_forward`. All ranks call it, within `evaluating`; on the last stage `take` is given what
        leaves it.
        """

    @abstractmethod
    def evaluating(self) -> ContextManager[None]:
        """Without gradients, dropout, events or traffic, with the average of the weights where there is one; then
        training goes on as if nothing had been in between."""

    @property
    def updates(self) -> int:
        """How far the learning rate's policy has come."""
        return int(self.optimizer.updates)

    @property
    def stage_updates(self) -> Optional[int]:
        """Updates of this stage's weights, where stages count their own."""
        return None

    @property
    def island(self) -> Tuple[int, int]:
        """The number of this rank's island, and how many there are."""
        return 0, 1

    @property
    def saves(self) -> bool:
        """Whether this rank's replica writes its stages' parts of checkpoints."""
        return self._place.dp == 0

    @property
    def max_forward(self) -> int:
        """Micro-batches that `forward` takes at most."""
        return self.assignment.count

    @property
    def max_iteration_skew(self) -> int:
        """The most iterations that ranks may be apart, at least 1."""
        return 1

    def soonest_end(self, iteration: int) -> int:
        """Returns after which iteration the run ends, when it is asked to after this one."""
        return iteration

    def progress(self, iteration: int) -> Progress:
        """Returns where the run stands after the last iteration, with the shares that it had."""
        consumed, size = self.consumed(iteration), self.global_batch_size
        return Progress(consumed, size, self._learning_rate(consumed))

    def _learning_rate(self, consumed: int) -> float:
        """Returns the learning rate of the update after so many samples."""
        return rate_of(self._plan, self.updates, consumed, self.global_batch_size)

    @contextmanager
    def _waiting_for_samples(self) -> Iterator[None]:
        begun = time.monotonic()
        with self._recorder.span("batch-generator"):
            yield
        self.waited_s += time.monotonic() - begun

    def _batch(self, iteration: int) -> Dict[int, Optional[Micro]]:
        """This replica's micro-batches, by number; what they hold, where the rank has a use for it."""
        own = self.assignment.own(iteration)
        with self._waiting_for_samples() if self._loader.looks_at_samples else NOTHING:
            coming = chain.from_iterable(map(self.assignment.own, counting(iteration + 1)))
            return self._loader.micros(self._samples, own, self.assignment.keys(len(own)), coming)
