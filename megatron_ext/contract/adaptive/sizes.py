"""How replicas share the samples of an iteration where each may choose among several sizes of micro-batches."""

from __future__ import annotations

import math
from functools import reduce
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from megatron_ext.contract.schedule.deal import Division

TRIAL = 0.1
"""By which part of itself a sample is taken to be faster in micro-batches that are larger than all that were tried."""
NEAR = 1e-4
"""How near to the least possible time a division comes, relative to it."""


class Replica(NamedTuple):
    """What a replica takes."""

    seconds: Mapping[int, float]
    """Of one micro-batch, by its size in samples."""
    fixed: float = 0.0
    """Of an iteration, beside its micro-batches."""

    def ready(self, count: int, size: int) -> float:
        """Seconds until it has taken so many micro-batches."""
        return count * self.seconds[size] + self.fixed

    def most(self, size: int, samples: int, limit: float) -> int:
        """Micro-batches of so many samples together that it takes within a limit of time."""
        return min(samples // size, int((limit - self.fixed) / self.seconds[size] * (1.0 + 1e-12)))


class Measured:
    """The times of one replica's micro-batches by size, as far as they were measured."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are all that it may have."""
        self._sizes = sorted(sizes)
        self._known: Dict[int, float] = {}

    def note(self, size: int, seconds: float) -> None:
        """What one of `size` has taken. Where that was known, all sizes become as much faster or slower."""
        factor = seconds / self._known.get(size, seconds)
        self._known = {**{other: known * factor for other, known in self._known.items()}, size: seconds}

    def expected(self) -> Dict[int, float]:
        """Seconds by size, once one was measured: of those that were, of smaller ones, and of the next larger one.

        That one is taken to gain `TRIAL`, so that it is tried once; in a smaller one a sample takes as long.
        """
        found, largest = {}, max(self._known)
        for size in self._sizes:
            if size > largest:
                found[size] = self._known[largest] * size / largest * (1.0 - TRIAL)
                break
            nearest = min(other for other in self._known if other >= size)
            found[size] = self._known[nearest] * size / nearest
        return found


def longest(replicas: Sequence[Replica], division: Division) -> float:
    """When the slowest replica is ready."""
    return max(of.ready(count, size) for of, count, size in zip(replicas, division.shares, division.sizes))


def fastest(replicas: Sequence[Replica], samples: int, least: int = 1) -> Optional[Division]:
    """The division of so many samples whose slowest replica ends soonest; None where there is none.

    A replica has micro-batches of one size, `least` of them or more. The time is found by bisection: whether it is
    enough follows from the sums of samples that the replicas can take in it, which are kept as the bits of a number.
    """
    unit = reduce(math.gcd, (size for of in replicas for size in of.seconds))
    low, high = 0.0, max(of.ready(samples // size + 1, size) for of in replicas for size in of.seconds)
    if samples % unit or not _can(replicas, samples, unit, least, high):
        return None
    while high - low > NEAR * high:
        middle = (low + high) / 2.0
        if _can(replicas, samples, unit, least, middle):
            high = middle
        else:
            low = middle
    return _taken(replicas, samples, unit, least, high)


def _can(replicas: Sequence[Replica], samples: int, unit: int, least: int, limit: float) -> bool:
    return bool(_sums(replicas, samples, unit, least, limit)[-1] >> samples // unit & 1)


def _sums(replicas: Sequence[Replica], samples: int, unit: int, least: int, limit: float) -> List[int]:
    """Of the first replicas, from none to all: the units of samples that they can take together within the limit, as
    bits."""
    found, mask = [1], (1 << samples // unit + 1) - 1
    for of in replicas:
        after = 0
        for size in of.seconds:
            count = of.most(size, samples, limit) - least + 1
            if count > 0:
                after |= _spread(found[-1] << least * size // unit, size // unit, count)
        found.append(after & mask)
    return found


def _spread(bits: int, step: int, count: int) -> int:
    """The bits, and `count` - 1 copies of them, each `step` further up than the one before."""
    done = 1
    while done < count:
        more = min(done, count - done)
        bits |= bits << more * step
        done += more
    return bits


def _taken(replicas: Sequence[Replica], samples: int, unit: int, least: int, limit: float) -> Division:
    """Who takes what within the limit, from the last replica to the first: what takes it least, if the others can take
    what it leaves."""
    shares, sizes = [], []
    sums = _sums(replicas, samples, unit, least, limit)
    for of, others in zip(reversed(replicas), reversed(sums[:-1])):
        fitting = [
            (of.ready(count, size), size, count)
            for size in of.seconds
            for count in range(least, of.most(size, samples, limit) + 1)
            if others >> (samples - count * size) // unit & 1
        ]
        _, size, count = min(fitting)
        samples -= count * size
        shares.append(count)
        sizes.append(size)
    return Division(tuple(shares[::-1]), tuple(sizes[::-1]))
