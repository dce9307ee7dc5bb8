"""Weights that are updated bucket by bucket while later gradients are still summed, are the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_ext.engine import engine
from reports.readers.events import read_rank
from tests.support.megatron_ext.engine_run import EngineRun

REPLICAS = (
    *("parallel.pipeline=1", "parallel.data=3", "parallel.shares=2-1-1", "parallel.micro_batch_size=2"),
    *("train.clip_grad=0", "train.ema=0.9", "train.weight_decay=0.1", "model.hidden_dropout=0.1"),
)


def updates(run: EngineRun) -> int:
    """Of weights, in its second iteration, on a rank."""
    events = read_rank(run.run.rank_events(1))
    second = events.records[events.records["iteration"] == 2]
    return [events.names[name] for name in second["name"]].count("optimizer")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["train.optimizer=adam", "train.precision=bf16"], id="adam-bf16"),
        pytest.param(["train.optimizer=sgd", "train.nesterov=true", "train.lr=0.1"], id="sgd", marks=pytest.mark.slow),
    ],
)
def test_overlapping_changes_no_bit_of_losses_norms_and_state_also_after_a_restart(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 16384)  # several; the ranks are forked from this process
    options = [*REPLICAS, *options, "train.lr_decay_iterations=4"]
    plain = engine_run(*options, "train.overlap_optimizer=false", name="plain")
    assert plain.go() == 0, plain.stderr()
    half = engine_run(*options, "train.iterations=2", name="overlapping")
    assert half.go() == 0, half.stderr()
    assert updates(plain) == 1
    assert updates(half) > 3, "it did not overlap"
    overlapping = half.replan(*options)
    assert overlapping.go() == 0, overlapping.stderr()
    for one, other in zip(plain.metrics(), overlapping.metrics(), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    expected, found = plain.state(), overlapping.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
