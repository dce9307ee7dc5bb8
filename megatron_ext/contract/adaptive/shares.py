"""How replicas share the micro-batches of an iteration, given how long each takes for one."""

from __future__ import annotations

import heapq
from typing import Iterator, List, NamedTuple, Sequence, Tuple


class Times(NamedTuple):
    """What was measured."""

    micro_batch_s: Sequence[float]
    """Seconds that one micro-batch takes on each replica: in a pipeline, its slowest stage."""
    iteration_s: float
    """Seconds of a whole iteration."""
    fixed_s: Sequence[float] = ()
    """Seconds of each replica beside these until its last pass: in a pipeline, until it is full and while it empties.
    Empty: none."""


def fastest(seconds: Sequence[float], count: int, fixed: Sequence[float] = ()) -> Tuple[int, ...]:
    """The shares of `count` micro-batches, one at least for each replica, whose slowest replica ends soonest.

    `seconds` are of one micro-batch, by replica, `fixed` what each takes beside them. No other shares are faster:
    whoever takes one micro-batch more is the one who is ready with it first. Of replicas that are equally long the
    lower one takes it.
    """
    assert count >= len(seconds), "a replica would have no micro-batch"
    fixed = fixed or (0.0,) * len(seconds)
    level = count - len(seconds) + sum(f / s for f, s in zip(fixed, seconds))
    until = level / sum(1.0 / s for s in seconds)
    # Nobody takes less than what it is ready with until then, but for the last micro-batches, which are dealt.
    shares = [max(1, int((until - f) / s)) for f, s in zip(fixed, seconds)]
    if sum(shares) > count:  # somebody is not ready with one micro-batch until then
        shares = [1] * len(seconds)
    queue: List[Tuple[float, int]] = [((n + 1) * s + f, r) for r, (n, s, f) in enumerate(zip(shares, seconds, fixed))]
    heapq.heapify(queue)
    for _ in range(count - sum(shares)):
        _, replica = queue[0]
        shares[replica] += 1
        heapq.heapreplace(queue, ((shares[replica] + 1) * seconds[replica] + fixed[replica], replica))
    return tuple(shares)


def dealt(seconds: Sequence[float], fixed: Sequence[float] = ()) -> Iterator[int]:
    """The replica that takes each micro-batch behind the first one of everybody, without end: the shares that so many
    of them make are those of `fastest`."""
    shares, fixed = [1] * len(seconds), fixed or (0.0,) * len(seconds)
    queue: List[Tuple[float, int]] = [(2 * s + f, r) for r, (s, f) in enumerate(zip(seconds, fixed))]
    heapq.heapify(queue)
    while True:
        _, replica = queue[0]
        shares[replica] += 1
        heapq.heapreplace(queue, ((shares[replica] + 1) * seconds[replica] + fixed[replica], replica))
        yield replica


class SlowestReplica:
    """Says when the slowest replica is ready, by the micro-batches of all replicas, which are dealt in an order."""

    def __init__(self, order: Iterator[int], seconds: Sequence[float], fixed: Sequence[float] = ()) -> None:
        """`seconds` are of one micro-batch, by replica, `fixed` what each takes beside them."""
        self._order = order
        self._seconds = seconds
        self._fixed = fixed or (0.0,) * len(seconds)
        self._shares = [1] * len(seconds)
        self._known = [longest(seconds, self._shares, fixed)]
        """By the micro-batches behind the first one of everybody."""

    def of(self, counts: Sequence[int]) -> List[float]:
        """Seconds that so many micro-batches take, by their number; these ascend, and each replica has one at least."""
        everybody = len(self._shares)
        assert counts[0] >= everybody, "a replica would have no micro-batch"
        while counts[-1] - everybody >= len(self._known):
            replica = next(self._order)
            self._shares[replica] += 1
            ready = self._shares[replica] * self._seconds[replica] + self._fixed[replica]
            self._known.append(max(self._known[-1], ready))
        return [self._known[count - everybody] for count in counts]


def longest(seconds: Sequence[float], shares: Sequence[int], fixed: Sequence[float] = ()) -> float:
    """Returns when the slowest replica is ready."""
    return max(n * s + f for n, s, f in zip(shares, seconds, fixed or (0.0,) * len(seconds)))


def overhead(times: Times, shares: Sequence[int]) -> float:
    """Seconds of an iteration with these shares that do not depend on them, as far as they were measured."""
    return max(0.0, times.iteration_s - longest(times.micro_batch_s, shares, times.fixed_s))
