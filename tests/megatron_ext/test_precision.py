"""Half precision follows fp32 closely, and an overflow under fp16's loss scale costs an iteration, not the run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.megatron_ext.engine_run import EngineRun

LAYOUTS = {
    "one": ("parallel.data=1", "parallel.pipeline=1"),
    "uneven": ("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.sharded_optimizer=true"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bf16_follows_fp32(engine_run: Callable[..., EngineRun], layout: tuple[str, ...]) -> None:
    runs = [engine_run(*layout, f"train.precision={p}", "train.iterations=8", name=p) for p in ("fp32", "bf16")]
    for run in runs:
        assert run.go() == 0, run.stderr()
    exact, half = (run.losses() for run in runs)
    assert exact[-1] < exact[0]
    np.testing.assert_allclose(half, exact, rtol=0, atol=0.02)


def test_fp16_skips_overflows_logs_them_and_then_trains(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*LAYOUTS["uneven"], "train.precision=fp16", "train.iterations=40", "train.lr=1e-2")
    assert run.go() == 0, run.stderr()
    metrics = run.metrics()
    skipped = [line["skipped"] for line in metrics]
    first = skipped.index(0)
    assert first > 5
    assert skipped[:first] == [1] * first
    # The first overflow uses up the patience, each further one halves the scale.
    assert metrics[first]["loss_scale"] == 2.0 ** (32 - (first - 1))
    assert metrics[first - 1]["learning_rate"] == 0.0
    assert metrics[0]["loss"] is None  # nothing was trained
    assert "lm loss" not in run.run.node_out("local-0").read_text().split("iteration        2/")[0]
    trained = [line["loss"] for line in metrics if not line["skipped"]]
    assert trained[-1] < trained[0] - 0.5
    assert f"number of skipped iterations: {1:3d}" in run.run.node_out("local-0").read_text()
