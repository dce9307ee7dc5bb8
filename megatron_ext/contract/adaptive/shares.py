"""How replicas share the micro-batches of an iteration, given how long each takes for one."""

from __future__ import annotations

import heapq
from typing import List, NamedTuple, Sequence, Tuple


class Times(NamedTuple):
    """What was measured."""

    micro_batch_s: Sequence[float]
    """Of each replica, seconds that one micro-batch takes."""
    iteration_s: float
    """Of a whole iteration."""


def fastest(seconds: Sequence[float], count: int) -> Tuple[int, ...]:
    """The shares of `count` micro-batches, one at least for each replica, whose slowest replica ends soonest.

    `seconds` are of one micro-batch, by replica. No other shares are faster: whoever takes one micro-batch more is the
    one who is ready with it first. Of replicas that are equally long the lower one takes it.
    """
    assert count >= len(seconds), "a replica would have no micro-batch"
    speed = sum(1.0 / s for s in seconds)
    # Nobody takes less than the part that is due to its speed, but for the last micro-batches, which are dealt.
    shares = [max(1, int((count - len(seconds)) / speed / s)) for s in seconds]
    queue: List[Tuple[float, int]] = [((n + 1) * s, r) for r, (n, s) in enumerate(zip(shares, seconds))]
    heapq.heapify(queue)
    for _ in range(count - sum(shares)):
        _, replica = queue[0]
        shares[replica] += 1
        heapq.heapreplace(queue, ((shares[replica] + 1) * seconds[replica], replica))
    return tuple(shares)


def longest(seconds: Sequence[float], shares: Sequence[int]) -> float:
    """When the slowest replica is ready."""
    return max(n * s for n, s in zip(shares, seconds))


def overhead(times: Times, shares: Sequence[int]) -> float:
    """Seconds of an iteration with these shares that do not depend on them, as far as they were measured."""
    return max(0.0, times.iteration_s - longest(times.micro_batch_s, shares))
