"""A GPU's memory is predicted as torch's own allocator gives it, which is at work under the stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_counts import CASES, MICRO_BATCHES, Case, Counter, words_of
from conf.compose import compose
from fasop.costs.host_activations import kept_by_layer
from fasop.costs.training import Training
from fasop.simulation.predict import predict
from launch.commands.launching.preflight import with_length
from tests.cuda.test_stand_in import HEADER
from tests.support.megatron_ext.engine_run import EngineRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HEADER.exists(), reason="Triton builds its launcher with Python's headers"),
]
MIB = 2**20
LEAST, MOST = -0.01, 0.03
"""By how much of what was given out at most a prediction may be off."""


def assert_memory_as_predicted(case: Case, run: EngineRun) -> None:
    """Of every rank: what was given out at most, and what the allocator held besides, which is the fragments'."""
    stages = predict(with_length(compose([*words_of(case), f"data.prefix={run.plan.data_prefix}"]))).stages
    for place in run.plan.ranks:
        measured = json.loads((run.run.path / "memory" / f"rank-{place.rank:05d}.json").read_text())["mib"]
        stage = stages[place.stage]
        parts = {name: amount.of(sum(stage.layers)) / MIB for name, amount in stage.memory.by_term().items()}
        fragments, predicted = parts.pop("fragments"), sum(parts.values()) - parts["communicators"] - parts["context"]
        given, held = measured["max_allocated"], measured["max_reserved"]
        assert LEAST <= predicted / given - 1 <= MOST, (place.rank, predicted, given, parts)
        assert held - given <= fragments, (place.rank, held, given, fragments)


MEASURED = ("sharded optimizer", "two stages", "recomputed", "some layers recomputed", "offloaded")
OFFLOADED = ("activations offloaded", "two stages, activations offloaded")
SCATTERED = ("scattered gradients", "scattered gradients of tied words")


@pytest.mark.parametrize("name", [*MEASURED, *SCATTERED])
def test_memory_of_a_layout_is_predicted(name: str, tmp_path: Path) -> None:
    case, counter = CASES[name], Counter(tmp_path)
    run = counter.run_of(case)
    ranks = counter.ours(run, case.gpus)
    assert_memory_as_predicted(case, run)
    for rank in ranks:
        before_training, after_one, *_ = rank.peaks
        assert before_training < 1.01 * after_one, "the pass that loads kernels takes more memory than training"


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_activations_leave_as_much_memory_as_is_predicted(name: str, tmp_path: Path) -> None:
    """Bytes that go to the host in an iteration are those of all layers and micro-batches; those of a last layer need
    not come back."""
    case, counter = CASES[name], Counter(tmp_path)
    run = counter.run_of(case)
    ranks = counter.ours(run, case.gpus)
    assert_memory_as_predicted(case, run)
    of_layer = kept_by_layer(Training.of(compose([*words_of(case), f"data.prefix={run.plan.data_prefix}"])), 0)
    for place, rank in zip(run.plan.ranks, ranks, strict=True):
        layers = run.plan.partition[place.stage]
        assert rank.copied["gpu-host"] == pytest.approx(MICRO_BATCHES * layers * of_layer, rel=0.01)
        assert layers - 1 <= rank.copied["host-gpu"] / (MICRO_BATCHES * of_layer) <= 1.01 * layers
        assert sum(rank.waits.values()) <= 3
