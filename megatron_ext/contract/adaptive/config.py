"""What a plan says of a batch that adapts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

NONE, SIMILARITY, NOISE, GOODPUT = RULES = ("none", "similarity", "noise", "goodput")
CONSTANT, SQRT, LINEAR = LR_SCALINGS = ("none", "sqrt", "linear")
ADAPTS = ("one_f_one_b", "gpipe", "zb_h1")
"""The schedules that there are for any number of micro-batches."""
EXPONENTS = {CONSTANT: 0.0, SQRT: 0.5, LINEAR: 1.0}
"""By how the learning rate follows the batch: it grows with this power of it."""
ADAPT_OPTIONS: Dict[str, Any] = {"micro_batch_sizes": None, "streams": None}
"""What `AdaptConfig` may lack, and has then."""


@dataclass(frozen=True)
class AdaptConfig:
    """When the batch or its shares change, and how."""

    rule: str
    """One of `RULES`; with `none` the batch stays as it is."""
    target: float
    """The similarity of both halves of a batch that is sought (of `similarity` and `noise`)."""
    lower: int
    """The smallest global batch, in samples."""
    upper: int
    """The largest one."""
    every: int
    """Iterations between two measurements, each of which is followed by a decision."""
    rate: float
    """By which part of itself the batch grows or shrinks at a time (of `similarity`)."""
    smoothing: int
    """How many measurements a decision takes together."""
    lr_scaling: str
    """One of `LR_SCALINGS`."""
    rebalance: bool
    """Whether shares follow measured times."""
    micro_batch_sizes: Optional[List[List[int]]] = None
    """By replica, the sizes that its micro-batches may have where these follow measured times, too: the plan's, and
    multiples of it that fit into memory."""
    streams: Optional[List[List[List[int]]]] = None
    """By replica and each of these sizes (of the plan's size alone, if there are none), the numbers of streams that it
    may have where these follow measured times, too."""

    @property
    def measures(self) -> bool:
        """Whether it needs the gradients of the halves."""
        return self.rule != NONE

    @property
    def follows_times(self) -> bool:
        """Whether the batch depends on how long an iteration takes."""
        return self.rule == GOODPUT

    def due(self, iteration: int) -> bool:
        """Whether a decision follows this iteration."""
        return iteration % self.every == 0


@dataclass(frozen=True)
class Adapted:
    """How far a run has come, as its checkpoints keep it."""

    micro_batch_size: int
    shares: List[int]
    """Of the iterations to come, by replica."""
    window: List[List[float]]
    """The newest measurements (`noise.Measurement`)."""
    sizes: Optional[List[int]] = None
    """Samples of a micro-batch, by replica; None where all have `micro_batch_size`."""
    streams: Optional[List[int]] = None
    """Copies of the model, by replica; None where all have one."""
    nodes: Optional[List[str]] = None
    """Of an elastic run, the node of each replica."""


def lr_factor(config: Optional[AdaptConfig], samples: int, reference: int) -> float:
    """The learning rate of a batch of so many samples, in parts of that of the `reference` batch."""
    if config is None or config.rule == NONE:
        return 1.0
    return float((samples / reference) ** EXPONENTS[config.lr_scaling])
