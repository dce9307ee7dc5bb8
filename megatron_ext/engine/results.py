"""What an iteration gives, and what ends a run in one."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional, Sequence

from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.errors import EngineError


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
    """Of all micro-batches of the global batch, where each has its own; on the last stage."""
    halves: Optional[Halves] = None
    """Of the gradient, where they were asked for; their weights are known on the last stage alone."""


class Progress(NamedTuple):
    """Where a run stands after an iteration."""

    consumed_samples: int
    global_batch_size: int
    """Of that iteration."""
    learning_rate: float
    """Of the next update."""


class NotFinite(EngineError):
    """A loss or a gradient is not a number, which ends a run."""


def not_finite(iteration: int, what: str, value: float) -> NotFinite:
    """What ends a run."""
    return NotFinite(
        f"iteration {iteration}: the {what} is {value}; nothing after it would mean anything. "
        "A smaller train.lr, a longer train.lr_warmup_iterations or stronger clipping (train.clip_grad) may help"
    )
