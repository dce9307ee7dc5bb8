"""A rehearsal of a pipeline without a flush takes the time that is predicted of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conf.compose import compose
from fasop.simulation.predict import predict
from tests.megatron_ext.engine.test_rehearsal import rehearse
from tests.support.megatron_ext.engine_run import EngineRun

__all__ = ["rehearse"]

NODES = ("cluster=a10x8", "executor=local", "container=none", "train.precision=bf16", "parallel.micro_batch_size=1")
STREAM = (
    *("model.untie_embeddings_and_output_weights=true", "parallel.schedule=pipedream", "parallel.data=1"),
    "train.iterations=24",
)
CASES = {
    "15-1": ("parallel.replicas=15-1", "parallel.partition=45-3", "parallel.global_batch_size=30"),
    "straight": ("parallel.pipeline=16", "parallel.partition=null", "parallel.global_batch_size=8"),
    "unlike": ("parallel.replicas=7-4-3-2", "parallel.partition=20-14-8-6", "parallel.global_batch_size=84"),
    "two": (
        *("parallel.replicas=8-8", "parallel.partition=24-24", "parallel.global_batch_size=20"),
        *("parallel.semantics=two", "parallel.update_every=2"),
    ),
    "data-parallel": ("parallel.replicas=16", "parallel.partition=48", "parallel.global_batch_size=16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rehearsal_takes_what_is_predicted(rehearse: Callable[..., EngineRun], case: str) -> None:
    stages = CASES[case][0].count("-") + 1 if "replicas" in CASES[case][0] else 16
    given = (*NODES, "parallel.node_order=gpu2*4", *STREAM, f"parallel.pipeline={stages}", *CASES[case])
    run = rehearse(*given)
    assert run.plan.world_size == 16
    predicted = predict(compose(["model=xl", "train=gpt2", *given]))
    elapsed = np.array([line["elapsed_ms"] for line in run.metrics()])
    assert elapsed[8:20].mean() == pytest.approx(predicted.iteration_s * 1e3, rel=1e-3)
    first, last = predicted.stages[0], predicted.stages[-1]
    if case == "15-1":  # two versions of the first stage's weights, and one of the last one's
        assert first.memory.weights.layer == pytest.approx(2 * last.memory.weights.layer)
