"""The nodes that an elastic training goes on with are those that take least for the batches ahead."""

from __future__ import annotations

import math
from random import Random

import pytest

from megatron_ext.contract.adaptive.forecast import DOLLARS, GAIN, HOUR, Candidate, Stretch, choose, forecast

FLAT = [Stretch(samples=1000.0, batch=10.0)]
"""A hundred iterations."""


def nodes(seconds: float, price: float | None = 1.0) -> Candidate:
    return Candidate(lambda _batch: seconds, price)


def test_a_batch_that_grew_evenly_goes_on_growing_so() -> None:
    history = [(samples, 64.0 * 2.0 ** (samples / 1000.0)) for samples in range(0, 5001, 500)]
    ahead = forecast(history, 2000.0, 64, 10**9, parts=4)
    assert [part.samples for part in ahead] == [500.0] * 4
    assert [part.batch for part in ahead] == pytest.approx([64 * 2.0 ** (5 + at) for at in (0.25, 0.75, 1.25, 1.75)])


def test_it_stays_within_its_bounds_and_stays_where_nothing_else_is_known() -> None:
    growing = [(0.0, 64.0), (10.0, 6400.0)]
    assert {part.batch for part in forecast(growing, 1e9, 64, 8192)} == {8192}
    assert {part.batch for part in forecast([*growing, (11.0, 64.0)], 1e9, 64, 8192)} <= {64, 8192}
    assert {part.batch for part in forecast([(500.0, 96.0)], 1000.0, 64, 8192)} == {96.0}
    assert {part.batch for part in forecast([(5.0, 64.0), (5.0, 128.0)], 1000.0, 64, 8192)} == {128.0}


def test_what_lies_far_back_counts_less() -> None:
    """Grown long ago, constant since."""
    history = [(at, 64.0 * 2.0 ** min(at / 100.0, 5.0)) for at in range(0, 10_000, 100)]
    assert forecast(history, 500.0, 1, 10**9)[-1].batch == pytest.approx(2048.0, rel=0.01)


@pytest.mark.parametrize("goal", ["time", "dollars"])
def test_the_choice_is_that_of_brute_force(goal: str) -> None:
    random = Random(goal)
    for _ in range(300):
        ahead = [Stretch(random.uniform(1, 1e4), random.uniform(1, 512)) for _ in range(random.randint(1, 5))]
        lines = [(random.uniform(0, 1), random.uniform(0, 0.1), random.uniform(1, 50)) for _ in range(6)]
        made = [Candidate(lambda b, f=fixed, m=more: f + m * b, price) for fixed, more, price in lines]  # type: ignore[misc]
        now, restart_s = random.randrange(6), random.choice([0.0, 10.0, 1e5])
        costs = []
        for number, (fixed, more, price) in enumerate(lines):
            seconds = sum(part.samples / part.batch * (fixed + more * part.batch) for part in ahead)
            seconds += restart_s * (number != now)
            costs.append(seconds if goal == "time" else seconds * price / HOUR)
        least = min(range(6), key=costs.__getitem__)
        wanted = least if costs[least] <= (1 - GAIN) * costs[now] else now
        found = choose(made, now, ahead, restart_s, goal)
        assert found.number == wanted, (lines, ahead, now, restart_s)
        assert (found.seconds if goal == "time" else found.dollars) == pytest.approx(costs[wanted])


def test_a_restart_has_to_pay_for_itself() -> None:
    """Half the time of 100 iterations of 1 s; 48 s of restart leave 2 %."""
    both = [nodes(1.0), nodes(0.5)]
    assert choose(both, 0, FLAT, 47.9).number == 1
    kept = choose(both, 0, FLAT, 48.1)
    assert (kept.number, kept.seconds) == (0, pytest.approx(100.0))
    assert "+1.9%" in kept.reason
    assert choose(both, 1, FLAT, 1e6).number == 1


def test_dollars_and_time_may_choose_unlike_nodes() -> None:
    few, many = nodes(1.0, 2.0), nodes(0.6, 4.0)
    assert choose([few, many], 0, FLAT, 0.0).number == 1
    assert choose([few, many], 0, FLAT, 0.0, DOLLARS).number == 0
    assert choose([few, nodes(0.1, None)], 0, FLAT, 0.0, DOLLARS).number == 0


def test_nodes_that_can_no_longer_take_the_batch_are_left_at_any_price() -> None:
    found = choose([nodes(math.inf), nodes(3.0), nodes(2.0)], 0, FLAT, 1e6)
    assert found.number == 2
    assert "cannot" in found.reason
    with pytest.raises(ValueError, match="no set of nodes"):
        choose([nodes(math.inf)], 0, FLAT, 0.0)
