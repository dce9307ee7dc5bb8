"""What replicas take, where it is not replayed action by action, is what a replay gives."""

from __future__ import annotations

from random import Random

import pytest

from fasop.simulation.iteration import Durations
from fasop.simulation.ranks.replay import StageTimes
from fasop.trainings.replica_nodes import FULL, PERIOD, SeveralStages, halves_of
from megatron_ext.contract.schedule.iteration import dealt


def drawn(random: Random, stages: int) -> Durations:
    """Stages with messages that take about as long as they compute, over links of one or two ways."""
    times = [
        StageTimes(
            forward=[random.uniform(0.5, 2.0)],
            backward=[random.uniform(1.0, 4.0)],
            send_forward=random.uniform(0.0, 4.0),
            send_backward=random.uniform(0.0, 4.0),
            busy_forward=random.uniform(0.0, 2.0),
            busy_backward=random.uniform(0.0, 2.0),
            one_way_out=random.random() < 0.3,
        )
        for _ in range(stages)
    ]
    by_stage = [[random.uniform(0.0, 1.0) for _ in range(stages)] for _ in range(3)]
    return Durations(times=times, gradients=by_stage[0], embedding=0.3, optimizer=by_stage[1], weights=by_stage[2])


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "zb_h1"])
def test_a_full_pipeline_is_as_its_replay(name: str) -> None:
    random = Random(name)
    for stages in (2, 3):
        durations = drawn(random, stages)
        count = max(FULL * stages, 2 * PERIOD) + random.randint(30, 40)
        replica = SeveralStages(name, 1, durations)
        again = (0.5,) * stages
        for halves in ((count,), (3, count)):
            replayed = replica.replayed(halves, again if len(halves) > 1 else ())
            found = replica.measuring(*halves, 1, again) if len(halves) > 1 else replica.iteration(*halves)
            assert found.whole == pytest.approx(replayed.whole, rel=1e-9), durations
            assert found.work == pytest.approx(replayed.work, rel=1e-9), durations
            assert found.passes == pytest.approx(replayed.passes, rel=1e-9), durations


def test_even_and_odd_micro_batches_are_those_that_are_dealt() -> None:
    random = Random(0)
    for _ in range(100):
        shares = [random.randint(1, 9) for _ in range(random.randint(1, 6))]
        takers = dealt(shares)
        wanted = [(takers[::2].count(replica), takers[1::2].count(replica)) for replica in range(len(shares))]
        assert halves_of(shares) == wanted, shares
