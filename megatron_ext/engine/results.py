"""What an iteration gives, and what ends a run in one."""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import median
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.errors import EngineError
from megatron_ext.tasks.task import Tensors


class StepResult(NamedTuple):
    """What one iteration gave."""

    loss: Optional[float]
    """Over the global batch; nan on all but the last stage, None in a rehearsal, which has none."""
    grad_norm: Optional[float]
    """Norm of the whole model's gradient before clipping; None in a rehearsal."""
    loss_scale: float
    skipped: bool
    """Whether an overflow under fp16's loss scale kept the weights as they were."""
    metrics: Mapping[str, float] = {}
    """Over the global batch, as the loss; on the last stage."""
    sizes: Sequence[Mapping[str, int]] = ()
    """The sizes of all micro-batches of the global batch, where each has its own; on the last stage."""
    expert_loads: Sequence[Sequence[float]] = ()
    """[layers][experts] over the global batch, as `Task.expert_loads`; on the last stage."""
    halves: Optional[Halves] = None
    """Both halves of the gradient, where they were asked for; their weights are known on the last stage alone."""


EXPERT_LOADS = "expert_loads"
"""Among metrics, the name of that table."""


def as_numbers(metrics: Tensors) -> Tensor:
    """All numbers of a micro-batch's metrics in a row."""
    return torch.cat([one.float().flatten() for one in metrics.values()]) if metrics else torch.zeros(0)


def from_numbers(numbers: Sequence[float], like: Tensors) -> Tuple[Dict[str, float], List[List[float]]]:
    """The metrics and the table of experts that `as_numbers` has put in a row."""
    metrics, table, at = {}, [], 0
    for name, one in like.items():
        if one.dim():
            width = one.shape[1]
            table = [list(numbers[at + row * width :][:width]) for row in range(len(one))]
        else:
            metrics[name] = numbers[at]
        at += one.numel()
    return metrics, table


class Progress(NamedTuple):
    """Says where a run stands after an iteration."""

    consumed_samples: int
    global_batch_size: int
    """The one of that iteration."""
    learning_rate: float
    """The one of the next update."""


class NotFinite(EngineError):
    """A loss or a gradient is not a number, which ends a run."""


def not_finite(iteration: int, what: str, value: float) -> NotFinite:
    """What ends a run."""
    return NotFinite(
        f"iteration {iteration}: the {what} is {value}; nothing after it would mean anything. "
        "A smaller train.lr, a longer train.lr_warmup_iterations or stronger clipping (train.clip_grad) may help"
    )


class Seconds(NamedTuple):
    """Medians over iterations."""

    work: float
    """What the rank does by itself."""
    passes: float
    """That, and its waits for other stages of its replica."""
    whole: float
    """The iteration."""


class Stopwatch:
    """Times the iterations since `take`; on a GPU, what it does there."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` says seconds, where a GPU has none of its own."""
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._began = 0.0
        self._passes: List[float] = []
        self._waits: List[float] = []
        self._queued: List[Tuple[List[float], int, torch.cuda.Event, torch.cuda.Event]] = []
        """Where to add it, and of which iteration: what a GPU has begun is read when it is asked for."""
        self._whole: List[float] = []

    def begin(self) -> None:
        """An iteration."""
        self._began = self._clock()
        self._passes.append(0.0)
        self._waits.append(0.0)

    def end(self) -> None:
        """The iteration, all of whose results are there."""
        self._whole.append(self._clock() - self._began)

    @contextmanager
    def working(self) -> Iterator[None]:
        """What this rank does for its replica: nothing in it waits for another replica."""
        with self._adding(self._passes):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts as a wait for another stage, while the rank works."""
        with self._adding(self._waits):
            yield

    def take(self) -> Optional[Seconds]:
        """Returns the medians, and begins anew; None where there was no iteration."""
        for to, number, first, last in self._queued:
            last.synchronize()
            to[number] += first.elapsed_time(last) / 1e3
        work = [passes - waits for passes, waits in zip(self._passes, self._waits)]
        found = Seconds(median(work), median(self._passes), median(self._whole)) if self._whole else None
        self._passes, self._waits, self._queued, self._whole = [], [], [], []
        return found

    @contextmanager
    def _adding(self, to: List[float]) -> Iterator[None]:
        if self._cuda:
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._queued.append((to, len(to) - 1, first, last))
        else:
            began = self._clock()
            yield
            to[-1] += self._clock() - began
