"""What plans with gathered weights (zero=3) are predicted to take, beside a rank that is followed step by step."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.simulation.linear import Hidden, Linear
from fasop.simulation.nodes import Nodes
from fasop.simulation.on_nodes import handing_out
from fasop.simulation.pipelines import Pipelines
from tests.support.fasop.plans import built, column, experiment, kinds, training

LAYERS = 48
WORDS = (
    *("cluster.groups.gpu2.count=1", "parallel.data=4", "parallel.pipeline=1", "parallel.partition=48"),
    "parallel.micro_batch_size=1",
)


def step_by_step(one: Pipelines, gather_s: float) -> float:
    """Seconds of an iteration of one stage with tied words: a layer's weights are asked for when the block before it
    begins, stay where the next pass begins with it, and share a link with the sums of gradients, first come, first
    served."""
    whole, layer = (np.array([[part.fixed[0, 0], part.layer[0, 0]] for part in (one.forward, one.backward)])).T
    assert one.hidden is not None
    sum_s, last_s, now, link = float(one.sums.layer.flat[0]), float(one.hidden.last[0, 0]), 0.0, 0.0

    def fetched() -> float:
        nonlocal link
        link = max(link, now) + gather_s
        return link

    ready = {0: fetched()}
    for _ in range(one.micro_batches):
        for way, order in enumerate((range(LAYERS), range(LAYERS - 1, -1, -1))):
            now += whole[way]  # of embedding and head: when does not matter here
            for place, block in enumerate(order):
                now = max(now, ready.pop(block))
                following = [*order][place + 1 : place + 2]
                for other in following:
                    ready[other] = fetched()
                now += layer[way]
                if way:
                    link = max(link, now) + sum_s
                if not following:
                    ready[block] = 0.0  # the next pass begins with it
        link = max(link, now) + last_s
    return max(now, link) + float(one.optimizer.of(np.array(LAYERS))[0, 0])


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("gbit_per_s", [16, 32, 64, 128, 512])
def test_passes_wait_for_weights_as_they_do_step_by_step(gbit_per_s: int, batch: int) -> None:
    words = (*WORDS, f"parallel.global_batch_size={batch}", f"cluster.groups.gpu2.intra_gbit_per_s={gbit_per_s}")
    handed = handing_out(training(*words, "parallel.zero=1"), Nodes(kinds(experiment(*words)), np.array([[0]])))
    one = built(experiment(*words, "parallel.zero=3"), [0])
    expected = step_by_step(one, float(handed.layer.flat[0]))
    assert one.iteration(column(LAYERS))[0] == pytest.approx(expected, rel=0.03)


def test_a_stage_without_layers_waits_for_no_weights_of_any() -> None:
    nothing = Linear(fixed=np.zeros((1, 1)), layer=np.zeros((1, 1)))
    hidden = Hidden(time=nothing, last=np.zeros((1, 1)), behind=nothing, at_turns=np.ones((1, 1)))
    assert [hidden.left(nothing, column(layers))[0, 0] for layers in (0, 1, 7)] == [0, 1, 1]
