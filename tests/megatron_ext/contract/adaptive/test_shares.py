"""Shares from measured times are the fastest that there are."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

import numpy as np
import pytest

from fasop.partition.exact_shares import Units, least_time
from megatron_ext.contract.adaptive.shares import SlowestReplica, dealt, fastest, longest


@pytest.mark.parametrize("seed", range(8))
def test_no_other_shares_are_faster(seed: int) -> None:
    random = Random(seed)
    for _ in range(50):
        seconds = [random.choice([0.5, 1.0, 1.5, random.uniform(0.1, 9)]) for _ in range(random.randint(1, 4))]
        count = random.randint(len(seconds), 12)
        cuts = combinations(range(1, count), len(seconds) - 1)
        ways = [np.diff([0, *cut, count]).tolist() for cut in cuts]
        found = fastest(seconds, count)
        assert sum(found) == count
        assert min(found) >= 1
        assert longest(seconds, found) == pytest.approx(min(longest(seconds, way) for way in ways), rel=1e-12)


def test_they_take_as_long_as_those_of_the_search() -> None:
    random = Random(3)
    for _ in range(30):
        seconds = [random.uniform(0.01, 0.2) for _ in range(random.randint(2, 40))]
        count = random.randint(len(seconds), 600)
        units = [Units(1, np.arange(count + 1) * one) for one in seconds]
        solved = least_time(units, count)
        assert solved is not None
        assert longest(seconds, fastest(seconds, count)) == pytest.approx(solved.seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_micro_batches_dealt_one_by_one_are_the_fastest_shares(seed: int) -> None:
    random = Random(seed)
    seconds = [random.choice([0.5, 1.0, 1.5, random.uniform(0.1, 9)]) for _ in range(random.randint(1, 9))]
    others = [random.uniform(0.1, 9) for _ in seconds]
    fixed = random.choice([[], [random.uniform(0, 20) for _ in seconds]])
    shares, order, counts = [1] * len(seconds), dealt(seconds, fixed), range(len(seconds), 300)
    for count in counts:
        assert tuple(shares) == fastest(seconds, count, fixed)
        shares[next(order)] += 1
    slowest = SlowestReplica(dealt(seconds, fixed), others, fixed)
    for some in (counts[100:], counts[:9]):
        assert slowest.of(some) == [longest(others, fastest(seconds, count, fixed), fixed) for count in some]


def test_replicas_of_one_speed_take_turns() -> None:
    assert fastest([2.0] * 3, 8) == (3, 3, 2)
    assert fastest([1.0, 3.0], 8) == (6, 2)
    assert fastest([1.0, 1e9], 2) == (1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_replica_takes_beside_its_micro_batches_counts(seed: int) -> None:
    random = Random(seed)
    seconds = [random.uniform(0.5, 2.0) for _ in range(3)]
    fixed = [random.choice([0.0, random.uniform(0.0, 6.0)]) for _ in range(3)]
    every = [one for one in product(range(1, 10), repeat=3) if sum(one) == 9]
    best = min(longest(seconds, one, fixed) for one in every)
    assert longest(seconds, fastest(seconds, 9, fixed), fixed) == pytest.approx(best)
