"""Half precision follows fp32 closely, and an overflow under fp16's loss scale costs an iteration, not the run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron_ext.engine.optimizer.precision import LogMaxScaler, LossScaler
from megatron_ext.engine.optimizer.update_rules import KINDS
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


def test_logmax_keeps_the_scale_below_all_but_a_thousandth_of_the_largest_gradients() -> None:
    """Of log-normal ones it finds 2^16 / 2^(mean + 3.09 deviations), whatever it begins with."""
    random = np.random.default_rng(0)
    mean, deviation = -7.0, 0.8
    scaler = LogMaxScaler()
    overflows = 0
    for largest in 2.0 ** random.normal(mean, deviation, 20_000):
        overflows += largest * scaler.scale >= 65536.0
        scaler.update(finite=True, largest=float(largest))
    assert overflows < 60
    assert np.log2(scaler.scale) == pytest.approx(16.0 - (mean + 3.09 * deviation), abs=0.5)


def test_logmax_falls_after_overflows_and_ignores_gradients_of_zero() -> None:
    scaler = LogMaxScaler()
    for _ in range(50):
        scaler.update(finite=True, largest=2.0**-20)
    assert scaler.scale == 2.0**24
    before = scaler.state()
    scaler.update(finite=True, largest=0.0)
    assert scaler.state() == before
    for _ in range(20):
        scaler.update(finite=False)
    assert scaler.scale < 2.0**12
    again = LogMaxScaler()
    again.load(scaler.state())
    assert again == scaler


def test_a_run_with_logmax_trains_and_goes_on_with_its_scale(engine_run: Callable[..., EngineRun]) -> None:
    options = ("train.precision=fp16", "train.loss_scaler=logmax", "train.lr_decay_iterations=8", "train.lr=1e-2")
    whole = engine_run(*LAYOUTS["one"], *options, "train.iterations=8", name="whole")
    assert whole.go() == 0, whole.stderr()
    assert whole.losses()[-1] < whole.losses()[0]
    scales = [line["loss_scale"] for line in whole.metrics()]
    assert scales[0] == 1.0 < scales[-1]
    assert sum(line["skipped"] for line in whole.metrics()) == 0
    half = engine_run(*LAYOUTS["one"], *options, "train.iterations=4")
    assert half.go() == 0, half.stderr()
    rest = half.replan(*LAYOUTS["uneven"], *options, "train.iterations=8")
    assert rest.go() == 0, rest.stderr()
    assert [line["loss_scale"] for line in rest.metrics()] == pytest.approx(scales, rel=0.02)
    np.testing.assert_allclose(rest.losses(), whole.losses(), rtol=0, atol=0.02)
