"""Half precision follows fp32 closely, and an overflow under fp16's loss scale costs an iteration, not the run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron_ext.engine.precision import LossScaler
from megatron_ext.engine.update_rules import KINDS
from tests.support.megatron_ext.engine_run import EngineRun

LAYOUTS = {
    "one": ("parallel.data=1", "parallel.pipeline=1"),
    "uneven": ("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.sharded_optimizer=true"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_half_precision_follows_fp32(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...]
) -> None:
    """Norms and Adam's moments too, which have no loss scale in them; fp16's begins where nothing overflows."""
    of = LossScaler.of
    small = LossScaler(scale=2.0**10, dynamic=True)
    monkeypatch.setattr(LossScaler, "of", lambda precision: small if precision == "fp16" else of(precision))
    options = ("train.iterations=8", "train.clip_grad=0")
    exact, *halves = (engine_run(*layout, *options, f"train.precision={p}", name=p) for p in ("fp32", "bf16", "fp16"))
    assert exact.go() == 0, exact.stderr()
    assert exact.losses()[-1] < exact.losses()[0]
    for half in halves:
        assert half.go() == 0, half.stderr()
        np.testing.assert_allclose(half.losses(), exact.losses(), rtol=0, atol=0.02)
        norms, expected = ([line["grad_norm"] for line in run.metrics()] for run in (half, exact))
        np.testing.assert_allclose(norms, expected, rtol=0.05)
        for kind in ("weights", *KINDS["adamw"]):
            found, wanted = (whole(run, kind) for run in (half, exact))
            assert (found - wanted).norm() < 0.1 * wanted.norm(), kind


def whole(run: EngineRun, kind: str) -> torch.Tensor:
    """Of all parameters, laid end to end."""
    return torch.cat([tensor.flatten() for name, tensor in run.state().items() if name.startswith(kind)])


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
