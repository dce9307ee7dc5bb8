"""The proportions in which replicas on unlike GPUs keep what they share out: those of the memory that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST = 2**14
"""What the proportions of a stage add up to at most: each bucket of weights is filled up to a multiple of it, 64 KiB of
gradients where a bucket has 16 MiB."""
FINEST = 256
"""Times the replicas: what the largest of them is at most."""


def proportions(rooms: Sequence[float]) -> list[int]:
    """Returns whole numbers in proportion to the bytes that each replica has room for, the smallest such; none is 0.

    All but the largest are rounded down, for what is left over is least where there is most room.
    """
    most, replicas = max(rooms), len(rooms)
    if most <= 0 or min(rooms) == most:
        return [1] * replicas
    finest = max(1, min(FINEST * replicas, MOST // replicas))
    found = [max(1, math.floor(finest * max(0.0, room) / most)) for room in rooms]
    return [number // math.gcd(*found) for number in found]


def slack(replicas: int) -> float:
    """Return the part of what a stage shares out that a replica may have beyond its own because of that rounding."""
    return 1 / min(FINEST, MOST / replicas**2)
