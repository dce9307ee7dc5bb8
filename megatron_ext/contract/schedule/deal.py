"""Which replica takes which micro-batch of an iteration, where replicas take unequal numbers of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Sequence, Tuple


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
