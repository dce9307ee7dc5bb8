"""A rehearsal lets pass what a search predicts: both derive their times from the same profiles and links."""

from __future__ import annotations

import numpy as np
import pytest

from conf.schema.experiment import Experiment
from fasop.simulation.linear import Linear
from launch.control.planning.predictions import rehearsal_times
from tests.support.fasop.plans import built, column, experiment, mixed

LINKS = "+cluster.links={hgx: {gpu2: {gbit_per_s: 10}}, gpu2: {hgx: {gbit_per_s_by_bytes: {1: 1, 9999: 5}}}}"
LOCAL = ("executor=local", "container=none", "train.precision=fp16")


@pytest.mark.parametrize(
    ("one", "order"),
    [
        (experiment(*LOCAL), [0] * 8),
        (mixed(*LOCAL), [0] + [1] * 7),
        (mixed(*LOCAL, "parallel.schedule=zb_h1"), [0] + [1] * 7),
        (mixed(*LOCAL, LINKS), [0] + [1] * 7),
    ],
    ids=["8-a10", "1-a100-7-a10", "zb-h1", "links-of-pairs"],
)
def test_the_seeds_stages_and_messages_take_the_same(one: Experiment, order: list[int]) -> None:
    by_stage = rehearsal_times(one)[:: one.parallel.data]
    mine, layers = built(one, order), column(*one.partition.layers)

    def ns(of: Linear) -> np.ndarray:
        return of.of(layers)[:, 0] * 1e9

    assert [times.forward_ns[0] for times in by_stage] == pytest.approx(ns(mine.forward), abs=2)
    assert [times.backward_ns[0] for times in by_stage] == pytest.approx(ns(mine.backward), abs=2)
    assert [times.send_forward_ns for times in by_stage] == pytest.approx(mine.hop[:, 0] * 1e9, abs=2)
    back = np.roll(mine.messages_back(layers)[0][:, 0], 1)
    assert [times.send_backward_ns for times in by_stage] == pytest.approx(back * 1e9, abs=2)
    assert (mine.sums.of(layers) - mine.exposed(layers)).max() > 0.005  # what the backward pass hides
    assert by_stage[0].embedding_all_reduce_ns == pytest.approx(mine.embedding[0] * 1e9, abs=4)
    assert [times.grads_all_reduce_ns for times in by_stage] == pytest.approx(mine.exposed(layers)[:, 0] * 1e9, abs=2)
