"""Gradients that replicas send each other in bf16: half the bytes, and sums that training hardly notices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatron_ext.contract.events import ALL_REDUCE, WEIGHTS
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.engine import engine
from tests.megatron_ext.engine.test_traffic import sent
from tests.support.megatron_ext.engine_run import EngineRun

Engine = Callable[..., EngineRun]
BF16 = "parallel.reduce_dtype=bf16"
FP32 = "parallel.reduce_dtype=fp32"


@pytest.mark.parametrize("bucket_bytes", [None, 1e4], ids=["one-bucket", "overlapped"])
@pytest.mark.parametrize(("sharded", "summed", "handed"), [("true", 2, 2), ("false", 4, 0)], ids=["sharded", "whole"])
def test_replicas_send_four_bytes_a_parameter(
    engine_run: Engine,
    sharded: str,
    summed: int,
    handed: int,
    bucket_bytes: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which each of n sends (n - 1) / n, with bf16 weights: those of sums and of weights, or out and back."""
    if bucket_bytes is not None:
        monkeypatch.setattr(engine, "BUCKET_BYTES", bucket_bytes)
    layout = "parallel.data=4 parallel.pipeline=1 train.precision=bf16"
    run = engine_run(*layout.split(), f"parallel.sharded_optimizer={sharded}", BF16)
    of_a_rank = run.plan.train.iterations * 3 * parameter_count(run.plan.model) // 4
    for one in sent(run):
        assert (one[ALL_REDUCE], one[WEIGHTS]) == (summed * of_a_rank, handed * of_a_rank)


@pytest.mark.parametrize(
    "words",
    [
        "parallel.data=2 parallel.pipeline=1",
        "parallel.data=2 parallel.pipeline=1 parallel.sharded_optimizer=true",
        "parallel.data=2 parallel.pipeline=2 parallel.sharded_optimizer=true",
        "parallel.data=2 parallel.pipeline=2 parallel.replicas=2-1 parallel.partition=2-1",
        "parallel.data=2 parallel.pipeline=1 train.clip_grad=0 train.overlap_optimizer=true",
        "parallel.data=2 parallel.pipeline=1 parallel.streams=2 parallel.micro_batch_size=2",
        "parallel.data=2 parallel.pipeline=2 parallel.schedule=pipedream parallel.partition=1-2 "
        "model.untie_embeddings_and_output_weights=true",
    ],
    ids=["whole", "sharded", "tied-stages", "unlike-replicas", "bucket-by-bucket", "streams", "pipedream"],
)
def test_every_layout_learns_nearly_the_same(engine_run: Engine, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 1e4)
    losses = {}
    for dtype in (FP32, BF16):
        run = engine_run(*words.split(), dtype, name=dtype[-4:])
        assert run.go() == 0, run.stderr()
        losses[dtype] = run.losses()
    assert not np.array_equal(losses[BF16], losses[FP32])
    assert losses[BF16] == pytest.approx(losses[FP32], rel=2e-3)


@pytest.mark.first
@pytest.mark.slow
def test_over_500_iterations_the_loss_stays_within_a_thousandth(engine_run: Engine) -> None:
    """Of means over 50 iterations, which the noise of single batches does not hide."""
    training = "train.iterations=500 train.lr=3e-3 train.min_lr=3e-4 parallel.data=2 parallel.pipeline=1"

    def means(name: str, *words: str) -> np.ndarray:
        run = engine_run(*training.split(), *words, name=name)
        assert run.go() == 0, run.stderr()
        return run.losses().reshape(10, 50).mean(axis=1)

    exact = means("fp32")
    assert exact[-1] < 0.5 * exact[0]
    for sharded in ("true", "false"):
        assert means(sharded, BF16, f"parallel.sharded_optimizer={sharded}") == pytest.approx(exact, rel=1e-3)
