"""How replicas share an iteration's samples, given how long each takes for a micro-batch.

Where each may also choose the size of its micro-batches, and in how many streams it takes them, a division says so.
"""

from __future__ import annotations

import heapq
import math
from functools import reduce
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.contract.adaptive.config import AdaptConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.iteration import SampleDivision, several


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
        """The longest replica for each number of micro-batches behind the first one of everybody."""

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


TRIAL = 0.1
"""The part by which a sample is taken to be faster in the next way that was not tried."""
NEAR = 1e-4
"""How near to the least possible time a division comes, relative to it."""


class Way(NamedTuple):
    """How a replica takes its samples: in rounds of `streams` micro-batches beside each other."""

    size: int
    """Samples of a micro-batch."""
    streams: int = 1

    @property
    def samples(self) -> int:
        """How many a round has."""
        return self.size * self.streams


class Replica(NamedTuple):
    """What a replica takes."""

    seconds: Mapping[Way, float]
    """Seconds of a round, by the way; the last one may have fewer micro-batches, and is taken to last as long."""
    fixed: float = 0.0
    """Seconds of an iteration beside its micro-batches."""

    def ready(self, count: int, way: Way) -> float:
        """Seconds until it has taken so many micro-batches."""
        return rounds(count, way.streams) * self.seconds[way] + self.fixed

    def most(self, way: Way, samples: int, limit: float) -> int:
        """Micro-batches of so many samples together that it takes within a limit of time."""
        within = int((limit - self.fixed) / self.seconds[way] * (1.0 + 1e-12))
        return min(samples // way.size, way.streams * within)


class Measured:
    """The times of one replica's rounds by the way it takes them, as far as they were measured."""

    def __init__(self, ways: Sequence[Way]) -> None:
        """`ways` are all that it may have."""
        self._ways = sorted(ways)
        self._known: Dict[Way, float] = {}

    def note(self, way: Way, seconds: float) -> None:
        """What a round has taken. Where that was known, all ways become as much faster or slower."""
        factor = seconds / self._known.get(way, seconds)
        self._known = {**{other: known * factor for other, known in self._known.items()}, way: seconds}

    @property
    def known(self) -> Mapping[Way, float]:
        """Seconds of a round by way, of those that were measured."""
        return self._known

    def expected(self) -> Dict[Way, float]:
        """Seconds by way, once one was measured: of those that were, and of others next to one that was.

        The next larger size, and the next larger and smaller number of streams, are taken to gain `TRIAL`, so that they
        are tried once. With smaller sizes and fewer streams than one that was measured a sample takes as long.
        """
        found = {}
        for way in self._ways:
            if way in self._known:
                found[way] = self._known[way]
                continue
            beside = [self._of_sample(other) * (1.0 - TRIAL) for other in self._next_to(way) if other in self._known]
            above = [other for other in self._known if other.size >= way.size and other.streams >= way.streams]
            if beside:
                found[way] = min(beside) * way.samples
            elif above:
                found[way] = self._of_sample(min(above, key=lambda other: (other.samples, other))) * way.samples
        return found

    def _of_sample(self, way: Way) -> float:
        return self._known[way] / way.samples

    def _next_to(self, way: Way) -> Iterator[Way]:
        """Returns those from which it would be tried."""
        same_size = [other for other in self._ways if other.size == way.size]
        yield from (other for other in same_size if abs(same_size.index(other) - same_size.index(way)) == 1)
        yield from [other for other in self._ways if other.streams == way.streams and other.size < way.size][-1:]


def ways_of(config: AdaptConfig, size: int, streams: Sequence[int]) -> List[List[Way]]:
    """What each replica may have, beside the plan's `size` and `streams`."""
    sizes = config.micro_batch_sizes or [[size] for _ in streams]
    counts = config.streams or [[[count]] * len(of_replica) for count, of_replica in zip(streams, sizes)]
    return [
        [Way(one, count) for one, of_size in zip(*of_replica) for count in of_size] for of_replica in zip(sizes, counts)
    ]


def rounds(count: int, streams: int) -> int:
    """Returns in how many rounds so many micro-batches are taken."""
    return -(-count // streams)


def longest_of_division(replicas: Sequence[Replica], division: SampleDivision) -> float:
    """Returns when the slowest replica is ready."""
    ways = map(Way, division.sizes, division.copies)
    return max(of.ready(count, way) for of, count, way in zip(replicas, division.shares, ways))


def fastest_division(replicas: Sequence[Replica], samples: int, least: int = 1) -> Optional[SampleDivision]:
    """The division of so many samples whose slowest replica ends soonest; None where there is none.

    A replica has micro-batches of one size, `least` of them or more, and one number of streams. The time is found by
    bisection: whether it is enough follows from the sums of samples that the replicas can take in it, which are kept as
    the bits of a number.
    """
    unit = reduce(math.gcd, (way.size for of in replicas for way in of.seconds))
    low, high = 0.0, max(of.ready(samples // way.size + 1, way) for of in replicas for way in of.seconds)
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
    """Returns for the first replicas, from none to all, the units of samples that they can take together within the
    limit, as bits."""
    found, mask = [1], (1 << samples // unit + 1) - 1
    for of in replicas:
        after = 0
        for size in {way.size for way in of.seconds}:
            most = max(of.most(way, samples, limit) for way in of.seconds if way.size == size)
            if most >= least:
                after |= _spread(found[-1] << least * size // unit, size // unit, most - least + 1)
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


def _taken(replicas: Sequence[Replica], samples: int, unit: int, least: int, limit: float) -> SampleDivision:
    """Who takes what within the limit, from the last replica to the first: what takes it least, if the others can take
    what it leaves."""
    shares, ways = [], []
    sums = _sums(replicas, samples, unit, least, limit)
    for of, others in zip(reversed(replicas), reversed(sums[:-1])):
        fitting = [
            (of.ready(count, way), way.streams, way, count)
            for way in of.seconds
            for count in range(least, of.most(way, samples, limit) + 1)
            if others >> (samples - count * way.size) // unit & 1
        ]
        *_, way, count = min(fitting)
        samples -= count * way.size
        shares.append(count)
        ways.append(way)
    sizes, copies = zip(*ways[::-1])
    return SampleDivision(tuple(shares[::-1]), sizes, several(copies))


def weights_of(plan: Plan) -> Sequence[float]:
    """How fast each replica is, in proportion, while this start has measured nothing."""
    elastic, adapt = plan.elastic, plan.adapt
    if elastic is None or elastic.times is None or adapt is None or not adapt.rebalance:
        return list(plan.micro_batches)
    return [elastic.weights[replica] for replica in elastic.replicas_on(plan.used, plan.tensor)]


def known_of(plan: Plan) -> List[Dict[Way, float]]:
    """Returns, by replica, the seconds of a round, by the way; empty where nothing was measured."""
    elastic = plan.elastic
    if elastic is None or elastic.times is None:
        return []
    return [
        {Way(one.size, one.streams): one.seconds for one in elastic.times[replica]}
        for replica in elastic.replicas_on(plan.used, plan.tensor)
    ]


def nodes_of(plan: Plan) -> Optional[List[str]]:
    """The node of each replica; None where these are the same in all starts."""
    if plan.elastic is None:
        return None
    return [plan.nodes[place.node].name for place in plan.ranks if place.tp == 0]
