"""Gradients that replicas sum within nodes first: the same training, and as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.contract.events import ALL_REDUCE, WEIGHTS
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.engine import engine
from tests.megatron_ext.engine.test_traffic import sent
from tests.support.megatron_ext.engine_run import EngineRun, make_run

Engine = Callable[..., EngineRun]
FOUR = "parallel.data=4 parallel.pipeline=1 parallel.micro_batch_size=1"
EIGHT = "parallel.data=4 parallel.pipeline=2 parallel.partition=1-2 parallel.micro_batch_size=1"
SHARDED = "parallel.sharded_optimizer=true"
BF16 = "parallel.reduce_dtype=bf16"
ONE_BUCKET, SMALL = float("inf"), 1e4
"""Bytes of a bucket."""


def trained(run: EngineRun) -> EngineRun:
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], np.ndarray]:
    """Losses of one process with a limit of the gradient's norm."""
    words = "parallel.data=1 parallel.pipeline=1 parallel.partition=3 parallel.micro_batch_size=1"

    @cache
    def losses(clip_grad: str) -> np.ndarray:
        run = make_run(tmp_path_factory.mktemp("alone") / "run", corpus, *words.split(), f"train.clip_grad={clip_grad}")
        return trained(run).losses()

    return losses


@pytest.mark.parametrize(
    ("words", "nodes", "stages", "bucket_bytes"),
    [
        (FOUR, (0, 0, 1, 1), [0], ONE_BUCKET),
        (FOUR, (0, 0, 1, 1), [0], SMALL),
        (f"{FOUR} {SHARDED}", (0, 0, 1, 1), [0], ONE_BUCKET),
        (f"{FOUR} {SHARDED} train.ema=0.9", (0, 1, 0, 1), [0], SMALL),
        (f"{FOUR} train.clip_grad=0 train.overlap_optimizer=true", (0, 1, 1, 0), [0], SMALL),
        (f"{FOUR} parallel.streams=2", (0, 0, 1, 1), [0], SMALL),
        (f"{EIGHT} {SHARDED}", (0, 0, 1, 1, 2, 2, 3, 3), [0], SMALL),
    ],
    ids=["whole", "whole-overlapped", "sharded", "sharded-turns", "bucket-by-bucket", "streams", "sharded-first-stage"],
)
def test_losses_are_those_of_one_process(
    engine_run: Engine,
    alone: Callable[[str], np.ndarray],
    words: str,
    nodes: Sequence[int],
    stages: list[int],
    bucket_bytes: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", bucket_bytes)
    run = engine_run(*words.split()).on_nodes(nodes, stages)
    assert len(run.plan.by_node) == len(stages)
    assert trained(run).losses() == pytest.approx(alone("0" if "clip_grad=0" in words else "0.5"), rel=1e-5)


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_sums_in_bf16_are_nearly_those_in_fp32(
    engine_run: Engine, alone: Callable[[str], np.ndarray], sharded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", SMALL)
    words = (*FOUR.split(), f"parallel.sharded_optimizer={sharded}", BF16)
    losses = trained(engine_run(*words).on_nodes((0, 0, 1, 1), [0])).losses()
    assert not np.array_equal(losses, alone("0.5"))
    assert losses == pytest.approx(alone("0.5"), rel=2e-3)


@pytest.mark.parametrize(
    ("nodes", "sharded"),
    [((0, 0, 0, 1), "true"), ((0, 0, 0, 1), "false"), ((0, 1, 2, 3), "true")],
    ids=["3-1-sharded", "3-1", "1-1-1-1"],
)
def test_on_nodes_with_unlike_numbers_of_replicas_or_one_each_it_changes_nothing(
    engine_run: Engine, nodes: Sequence[int], sharded: str
) -> None:
    words = (*FOUR.split(), f"parallel.sharded_optimizer={sharded}")
    plain = trained(engine_run(*words, name="plain"))
    run = engine_run(*words).on_nodes(nodes, [0])
    assert run.plan.by_node == []
    assert np.array_equal(trained(run).losses(), plain.losses())


@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, SMALL], ids=["one-bucket", "overlapped"])
@pytest.mark.parametrize(
    ("sharded", "dtype", "summed", "handed"),
    [("true", "fp32", 4, 4), ("true", "bf16", 2, 4), ("false", "fp32", 8, 0), ("false", "bf16", 4, 0)],
)
def test_a_replica_sends_as_many_bytes_as_in_a_ring_of_all(
    engine_run: Engine,
    sharded: str,
    dtype: str,
    summed: int,
    handed: int,
    bucket_bytes: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2 on each of 2 nodes: of a number a half within, a quarter across, and back; of weights likewise."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", bucket_bytes)
    words = (*FOUR.split(), f"parallel.sharded_optimizer={sharded}", f"parallel.reduce_dtype={dtype}")
    run = engine_run(*words).on_nodes((0, 0, 1, 1), [0])
    of_a_rank = run.plan.train.iterations * 3 * parameter_count(run.plan.model) // 4
    for one in sent(run):
        assert (one[ALL_REDUCE], one[WEIGHTS]) == (summed * of_a_rank, handed * of_a_rank)
