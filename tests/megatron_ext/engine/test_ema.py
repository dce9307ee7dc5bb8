"""The average of the weights: by its formula, the same under every layout, and what evaluations look at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_ext.checkpoints import safetensors
from tests.megatron_ext.engine.test_evaluation import LAYOUTS, ONE, evaluations
from tests.support.megatron_ext.checkpoints import resave
from tests.support.megatron_ext.engine_run import EngineRun

EVERY = ["train.save_interval=1", "train.keep_checkpoints=9", "data.split='70,30,0'", "train.eval_interval=4"]
EMA = [*EVERY, "train.ema=0.7"]


def averages(run: EngineRun) -> dict[str, torch.Tensor]:
    return {name.removeprefix("ema/"): value for name, value in run.state().items() if name.startswith("ema/")}


def weights_after(run: EngineRun, iteration: int) -> dict[str, torch.Tensor]:
    folder = run.plan.files.checkpoints / f"iter_{iteration:07d}"
    return {
        f"{path.stem}.{name.removeprefix('weights/')}": value
        for path in folder.glob("*.safetensors")
        for name, value in safetensors.read(path).items()
        if name.startswith("weights/")
    }


@pytest.fixture
def alone(engine_run: Callable[..., EngineRun]) -> EngineRun:
    run = engine_run(*ONE, *EMA, name="alone")
    assert run.go() == 0, run.stderr()
    return run


def test_it_follows_its_formula_and_leaves_training_alone(
    alone: EngineRun, engine_run: Callable[..., EngineRun]
) -> None:
    """The first iteration has a learning rate of 0, so its weights are the initial ones."""
    plain = engine_run(*ONE, *EVERY)
    assert plain.go() == 0, plain.stderr()
    assert plain.losses().tolist() == alone.losses().tolist()
    expected = weights_after(plain, 1)
    for iteration in (2, 3, 4):
        weights = weights_after(plain, iteration)
        expected = {name: 0.7 * value + 0.3 * weights[name] for name, value in expected.items()}
    found = averages(alone)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
    assert evaluations(alone)[4] != evaluations(plain)[4]


@pytest.mark.parametrize("layout", ["all-at-once", "unlike-stages"])
def test_every_layout_has_the_same_and_goes_on_with_it(
    alone: EngineRun, engine_run: Callable[..., EngineRun], layout: str
) -> None:
    run = engine_run(*LAYOUTS["shares"], *EMA, "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    run = run.replan(*LAYOUTS[layout], *EMA)
    assert run.go() == 0, run.stderr()
    for name, value in averages(alone).items():
        torch.testing.assert_close(averages(run)[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert evaluations(run)[4] == pytest.approx(evaluations(alone)[4], rel=1e-5)


def test_evaluations_take_it(alone: EngineRun) -> None:
    """The same average as the weights of a run that hardly moves them."""
    expected = evaluations(alone)[4]
    folder = alone.plan.files.checkpoints / "iter_0000004"

    def exchanged(_: str, content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        averages = {name.replace("ema/", "weights/"): content[name] for name in content if name.startswith("ema/")}
        return {**{name: one for name, one in content.items() if not name.startswith("ema/")}, **averages}

    resave(folder, exchanged)
    again = alone.replan(*LAYOUTS["tensor"], *EVERY, "train.iterations=5", "train.lr=1e-12", "train.min_lr=0")
    assert again.go() == 0, again.stderr()
    assert evaluations(again)[5]["valid_loss"] == pytest.approx(expected["valid_loss"], abs=1e-5)


def test_an_average_may_begin_with_the_weights_of_a_checkpoint(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*ONE, *EVERY, "train.iterations=2")
    assert run.go() == 0, run.stderr()
    before = weights_after(run, 2)
    again = run.replan(*LAYOUTS["shares"], *EMA, "train.iterations=3", "train.lr=1e-12", "train.min_lr=0")
    assert again.go() == 0, again.stderr()
    for name, value in averages(again).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-6, msg=name)
