"""Chains of round trips of one rank's micro-batches, against the rank's own list of passes."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.search.by_stage.bounds.turning import Rounds, most_trips
from megatron_ext.contract.parallel_config import Schedule
from megatron_ext.contract.schedule.schedules import Kind

SCHEDULES = (Schedule.zb_h1, Schedule.one_f_one_b, Schedule.gpipe)


def last_gradient(
    schedule: Schedule, sizes: tuple[int, int, int], forward: float, backward: float, away: float
) -> float:
    """Seconds until a rank has its last gradient, whose micro-batches are away for so long; `sizes` are those after it,
    before it and its own."""
    after, before, count = sizes
    now, found, back, one = 0.0, 0.0, dict[int, float](), schedule.definition
    for action in one.passes_of_rank(after, before, count):
        if action.kind is Kind.FORWARD:
            now += forward
            back[action.micro_batch] = now + away
        elif action.kind is Kind.BACKWARD_WEIGHT:
            now += (1 - one.input_share) * backward
        else:
            found = now = max(now, back[action.micro_batch]) + one.input_share * backward
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_is_done_before_its_round_trips_and_with_long_ones_1f1b_takes_no_longer(schedule: Schedule) -> None:
    for seed in range(300):
        rng = np.random.default_rng(seed)
        after, before, count = (int(rng.integers(first, 20)) for first in (0, 0, 1))
        forward, backward = rng.uniform(0.1, 1, 2)
        one, share, held = schedule.definition, schedule.definition.input_share, schedule.definition.ahead(after) + 1
        trips = range(int(most_trips(count - 1, held, held)) + 1)
        chains = [Rounds.of(count - 1, held, held, 1, one.lag(before), number) for number in trips]
        for away in (0.0, rng.uniform(0, 20), 1e3):
            last = last_gradient(schedule, (after, before, count), forward, backward, away)
            taken = [of_trips.passes(forward, backward, share) + (of_trips.trips + 2) * away for of_trips in chains]
            assert max(taken, default=0) <= last * (1 + 1e-12), (seed, away)
        if chains and not one.splits_backward:
            assert taken[-1] == pytest.approx(last, rel=1e-12)
