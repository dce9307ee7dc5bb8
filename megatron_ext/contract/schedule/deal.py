"""Which replica takes which micro-batch of an iteration, where replicas take unequal numbers of them, and which samples
these are."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Sequence, Tuple


def dealt(shares: Sequence[int]) -> Tuple[int, ...]:
    """The replica of each micro-batch of an iteration; `shares` is how many each replica takes.

    At every moment each has been dealt about its part of what was dealt so far: the k-th of a replica's n micro-batches
    (from 0) comes at (2 k + 1) / (2 n) of the iteration, the lower replica first (Webster's method). With equal shares
    replicas take micro-batches in turn, as in Megatron.
    """
    moments = [((2 * k + 1) / (2 * count), replica) for replica, count in enumerate(shares) for k in range(count)]
    return tuple(replica for _, replica in sorted(moments))


@lru_cache(maxsize=64)
def dealt_to(replica: int, shares: Tuple[int, ...]) -> Tuple[int, ...]:
    """The numbers of a replica's micro-batches among those of the iteration, rising."""
    return tuple(m for m, taker in enumerate(dealt(shares)) if taker == replica)


class SampleDivision(NamedTuple):
    """How the replicas of a stage share the samples of an iteration."""

    shares: Tuple[int, ...]
    """Micro-batches of each replica."""
    sizes: Tuple[int, ...]
    """Samples of each of its micro-batches, by replica."""
    streams: Tuple[int, ...] = ()
    """Copies of the model that each replica runs beside each other; empty: one each."""

    @property
    def samples(self) -> int:
        """Count the samples of the global batch."""
        return sum(count * size for count, size in zip(self.shares, self.sizes))

    @property
    def copies(self) -> Tuple[int, ...]:
        """Count the model's copies on each replica."""
        return self.streams or (1,) * len(self.shares)


def several(copies: Sequence[int]) -> Tuple[int, ...]:
    """Return copies as `Division.streams` has them."""
    return () if {*copies} <= {1} else tuple(copies)


def samples_of_halves(division: SampleDivision) -> Tuple[int, int]:
    """Count the samples of the even and the odd micro-batches of an iteration."""
    if len({*division.sizes}) == 1:  # they need not be dealt to be counted
        odd = sum(division.shares) // 2 * division.sizes[0]
    else:
        odd = sum(division.sizes[replica] for replica in dealt(division.shares)[1::2])
    return division.samples - odd, odd


@lru_cache(maxsize=64)
def firsts(division: SampleDivision) -> Tuple[int, ...]:
    """Where each micro-batch begins among the samples of its iteration, which follow each other as they are dealt."""
    sizes = [division.sizes[replica] for replica in dealt(division.shares)]
    return tuple(accumulate([0, *sizes[:-1]]))
