"""The keys of a batch that adapts, and what a plan has of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from megatron_ext.contract.keys import COUNT, PART, Range, Word, option


class Rule(Word):
    """How the next global batch is found (docs/adaptive.md)."""

    none = "none"
    """Keep the batch."""
    similarity = "similarity"
    """Grow or shrink it by a fixed rate, depending on how alike the gradients of its halves are (JABAS)."""
    noise = "noise"
    """Compute the batch whose halves are as alike as the target, from the measured noise scale."""
    goodput = "goodput"
    """Compute the batch with the most progress per second, from noise scale and measured times (Pollux)."""


class LrScaling(Word):
    """How the learning rate follows the batch; `train.lr` is for `parallel.global_batch_size`."""

    none = "none"
    sqrt = "sqrt"
    """With its square root."""
    linear = "linear"


NONE, SIMILARITY, NOISE, GOODPUT = RULES = tuple(Rule)
EXPONENTS = {LrScaling.none: 0.0, LrScaling.sqrt: 0.5, LrScaling.linear: 1.0}
"""The power of the batch with which the learning rate grows."""


@dataclass(frozen=True)
class Adapt:
    """When the batch or its shares change, and how."""

    rule: Rule = option(Rule.none, written=True)
    target: float = option(0.3, PART, written=True)
    """With rule similarity or noise: the target cosine between the gradients of the two halves of a batch."""
    lower: Optional[int] = option(None, COUNT, written=True)
    """The smallest global batch; null: parallel.global_batch_size."""
    upper: Optional[int] = option(None, COUNT, written=True)
    """The largest global batch; required by every rule."""
    every: int = option(100, COUNT, written=True)
    """Iterations between two measurements, each of which is followed by a decision."""
    rate: float = option(0.1, PART, written=True)
    """With rule similarity: the fraction by which the batch grows or shrinks."""
    smoothing: Optional[int] = option(None, Range(1, 1000), written=True)
    """Measurements that a decision combines; null: 1 with rule similarity, as in JABAS, else 4."""
    lr_scaling: LrScaling = option(LrScaling.sqrt, written=True)
    rebalance: bool = option(False, written=True)
    """Recompute the shares of the replicas from measured times whenever that gains more than 3 %."""


@dataclass(frozen=True)
class AdaptConfig(Adapt):
    """What a plan says of a batch that adapts, where one does."""

    lower: int = 1
    upper: int = 1
    smoothing: int = 1
    micro_batch_sizes: Optional[List[List[int]]] = option(None, COUNT)
    """For each replica, the sizes that its micro-batches may have where these follow measured times, too: the plan's,
    and multiples of it that fit into memory."""
    streams: Optional[List[List[List[int]]]] = option(None, COUNT)
    """For each replica and each of these sizes (of the plan's size alone, if there are none), the numbers of streams
    that it may have where these follow measured times, too."""

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
    """Micro-batches of each replica in the iterations to come."""
    window: List[List[float]]
    """The newest measurements (`noise.Measurement`)."""
    sizes: Optional[List[int]] = None
    """Samples of a micro-batch, by replica; None where all have `micro_batch_size`."""
    streams: Optional[List[int]] = None
    """Copies of the model, by replica; None where all have one."""
    nodes: Optional[List[str]] = None
    """The node of each replica in an elastic run."""


def lr_factor(config: Optional[AdaptConfig], samples: int, reference: int) -> float:
    """The learning rate of a batch of so many samples, in parts of that of the `reference` batch."""
    if config is None or config.rule == NONE:
        return 1.0
    return float((samples / reference) ** EXPONENTS[config.lr_scaling])
