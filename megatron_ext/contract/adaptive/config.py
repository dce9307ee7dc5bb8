"""The keys of a batch that adapts, and what a plan has of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, List, NamedTuple, Optional, Sequence

from megatron_ext.contract.adaptive.noise import sought_batch
from megatron_ext.contract.keys import COUNT, PART, Range, Word, option

MOST = 2.0
"""The largest factor by which a batch grows or shrinks at a time."""
DEAD_ZONE = 0.1
"""Logarithm of a batch's growth below which there is no reason to change it."""
GAIN = 0.03
"""Part of goodput or time below which there is no reason either."""
LOOKED_AT = 1000
"""Batches that a rule compares, about; of more, as many at even distances."""


class BatchRange(NamedTuple):
    """The batches that there are: even numbers of micro-batches, so that both halves are alike."""

    micro_batch_size: int
    least: int
    """Micro-batches, an even number."""
    most: int
    """The same, and no less."""

    @classmethod
    def between(cls, lower: int, upper: int, micro_batch_size: int, replicas: int) -> BatchRange:
        """Makes those from `lower` samples to `upper`, with a micro-batch for every replica at least. Raises
        ValueError: there is none."""
        least = _even_above(max(2, replicas, -(-lower // micro_batch_size)))
        most = _even_below(upper // micro_batch_size)
        if most < least:
            raise ValueError(
                f"no even number of micro-batches of {micro_batch_size} samples, at least one for each of {replicas} "
                f"replicas, lies between {lower} and {upper} samples"
            )
        return cls(micro_batch_size, least, most)

    def clamped(self, count: int) -> int:
        """The nearest that is one."""
        return min(max(_even_below(count), self.least), self.most)


def by_similarity(count: int, found: float, target: float, rate: float, batches: BatchRange) -> int:
    """JABAS's rule, after SimiGrad: up or down by a rate, rounded to an even number of micro-batches.

    There, a batch that rounding brings back to itself stays for ever; here it goes on to the next rung.
    """
    if math.isnan(found) or found == target:
        return count
    size = batches.micro_batch_size
    samples, lower, upper = count * size, batches.least * size, batches.most * size
    if found < target:
        wanted = round(min(samples * (1.0 + rate), upper) / size)
        return batches.clamped(max(wanted + wanted % 2, _even_below(count) + 2))
    wanted = round(max(samples * (1.0 - rate), lower) / size)
    return batches.clamped(min(wanted - wanted % 2, _even_above(count) - 2))


def by_noise(count: int, scale: float, target: float, batches: BatchRange) -> int:
    """Goes to the batch whose halves are as similar as the target, by the noise scale in samples; at most twice as
    far."""
    samples = count * batches.micro_batch_size
    growth = min(max(sought_batch(target, scale) / samples, 1.0 / MOST), MOST)
    if abs(math.log(growth)) <= DEAD_ZONE:
        return count
    return batches.clamped(2 * round(count * growth / 2.0))


def by_goodput(
    count: int, scale: float, reference: int, seconds: Callable[[Sequence[int]], List[float]], batches: BatchRange
) -> int:
    """Goes to the batch of the largest goodput (Qiao et al. 2021): samples a second, each worth what it would be in the
    `reference` batch; `seconds` says how long iterations of so many micro-batches take, for ascending numbers."""

    def goodput(numbers: Sequence[int]) -> List[float]:
        samples = [n * batches.micro_batch_size for n in numbers]
        rates = [of / took for of, took in zip(samples, seconds(numbers))]
        if math.isinf(scale):
            return rates
        return [rate * ((scale + reference) / (scale + of)) for rate, of in zip(rates, samples)]

    low, high = batches.clamped(math.ceil(count / MOST)), batches.clamped(math.floor(count * MOST))
    compared = range(low, high + 1, 2 * max(1, (high - low) // LOOKED_AT // 2))
    found = goodput(compared)
    best = max(found)
    return compared[found.index(best)] if best > (1.0 + GAIN) * goodput([count])[0] else count


def _even_below(count: int) -> int:
    return count - count % 2


def _even_above(count: int) -> int:
    return count + count % 2


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


@dataclass(frozen=True, init=False, repr=False, eq=False)
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
