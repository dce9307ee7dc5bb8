"""Which global batch is next. A batch has a whole number of micro-batches, which rules call `count`."""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Sequence

from megatron_ext.contract.adaptive.noise import sought_batch

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
        """Makes those from `lower` samples to `upper`, with a micro-batch for every replica at least.

        Raises:
            ValueError: there is none.
        """
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
