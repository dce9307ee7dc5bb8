"""The learning rate's policies are torch's schedulers, or the formula of their paper, after a linear warm-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from megatron_ext.contract.train_config import LrPolicy, TrainConfig
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from tests.megatron_ext.engine.test_parts import SEED_TRAIN

LR, MIN_LR, WARMUP, DECAY = 0.4, 0.04, 7, 40
TRAIN = replace(SEED_TRAIN, lr=LR, min_lr=MIN_LR, lr_warmup_iterations=WARMUP, lr_decay_iterations=DECAY)
TORCH: dict[str, tuple[dict[str, object], Callable[[torch.optim.Optimizer], LRScheduler]]] = {
    "cosine": ({}, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, DECAY - WARMUP, eta_min=MIN_LR)),
    "linear": ({}, lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, MIN_LR / LR, DECAY - WARMUP)),
    "constant": ({}, lambda sgd: lr_scheduler.ConstantLR(sgd, factor=1.0)),
    "polynomial": (
        {"lr_power": 2.0, "min_lr": 0.0},
        lambda sgd: lr_scheduler.PolynomialLR(sgd, DECAY - WARMUP, power=2.0),
    ),
    "step": (
        {"lr_step_iterations": 9, "lr_gamma": 0.5, "min_lr": 0.0},
        lambda sgd: lr_scheduler.StepLR(sgd, 9, gamma=0.5),
    ),
    "exponential": (
        {"lr_step_iterations": 1, "lr_gamma": 0.9, "min_lr": 0.0},
        lambda sgd: lr_scheduler.ExponentialLR(sgd, gamma=0.9),
    ),
}


def test_every_policy_is_compared_with_something() -> None:
    assert {*TORCH, "noam"} == set(LrPolicy)


@pytest.mark.parametrize("policy", TORCH)
def test_it_equals_torchs_scheduler_after_the_warm_up(policy: str) -> None:
    options, make = TORCH[policy]
    train = replace(TRAIN, lr_policy=policy, **options)
    sgd = torch.optim.SGD([torch.zeros(1)], lr=LR)
    scheduler = make(sgd)
    for updates in range(WARMUP, DECAY + 1):  # torch's cosine rises again after its end
        assert learning_rate(updates, train) == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-9)
        sgd.step()
        scheduler.step()


def test_noam_is_the_papers_formula() -> None:
    width, warmup = 512, 4000
    train = replace(SEED_TRAIN, lr_policy="noam", lr=(width * warmup) ** -0.5, min_lr=0.0, lr_warmup_iterations=warmup)
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        assert learning_rate(step, train) == pytest.approx(width**-0.5 * min(step**-0.5, step * warmup**-1.5))


@pytest.mark.parametrize("policy", list(LrPolicy))
def test_it_warms_up_linearly_and_keeps_between_its_bounds(policy: str) -> None:
    options = TORCH.get(policy, ({}, None))[0] | {"min_lr": MIN_LR}
    train: TrainConfig = replace(TRAIN, lr_policy=policy, **options)
    assert [learning_rate(updates, train) for updates in range(WARMUP)] == [LR * n / WARMUP for n in range(WARMUP)]
    after = [learning_rate(updates, train) for updates in range(WARMUP, 10 * DECAY)]
    assert after[0] == LR
    assert min(after) >= MIN_LR
    assert after == sorted(after, reverse=True)
    assert policy == "constant" or after[-1] == pytest.approx(MIN_LR, rel=0.35)
