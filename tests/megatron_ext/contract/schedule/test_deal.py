"""Who takes which micro-batch, where replicas take unequal numbers of them."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from megatron_ext.contract.schedule.iteration import dealt, dealt_to


@pytest.mark.parametrize(("replicas", "each"), [(1, 5), (4, 1), (3, 7), (16, 3)])
def test_equal_shares_are_dealt_in_turn_as_in_megatron(replicas: int, each: int):
    assert dealt([each] * replicas) == tuple(range(replicas)) * each


@pytest.mark.parametrize("seed", range(50))
def test_every_replica_has_its_part_at_every_moment(seed: int):
    random = Random(seed)
    shares = [random.randint(1, 9) for _ in range(random.randint(1, 6))]
    order = dealt(shares)
    assert [order.count(replica) for replica in range(len(shares))] == shares
    for moment in range(len(order) + 1):
        for replica, share in enumerate(shares):
            due = Fraction(share * moment, len(order))
            assert abs(order[:moment].count(replica) - due) <= len(shares)
            if len(shares) == 2:
                assert abs(order[:moment].count(replica) - due) <= 1


def test_a_replica_takes_rising_numbers():
    assert dealt((3, 1)) == (0, 0, 1, 0)
    assert (dealt_to(0, (3, 1)), dealt_to(1, (3, 1))) == ((0, 1, 3), (2,))
