"""The learning rate after so many updates: a linear warm-up, then one of the policies of docs/training.md."""

from __future__ import annotations

import math
from typing import Callable, Dict

from megatron_ext.contract.adaptive.config import lr_factor
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.train_config import (
    CONSTANT,
    COSINE,
    EXPONENTIAL,
    LINEAR,
    NOAM,
    POLYNOMIAL,
    STEP,
    TrainConfig,
)


def learning_rate(updates: float, train: TrainConfig) -> float:
    """Linear warm-up from 0 to `lr`, then the policy, which never falls below `min_lr`.

    With the cosine this is what Megatron's scheduler has after `updates`.
    """
    if train.lr_warmup_iterations > 0 and updates <= train.lr_warmup_iterations:
        return train.lr * updates / train.lr_warmup_iterations
    return _POLICIES[train.lr_policy](updates, train)


def rate_of(plan: Plan, updates: float, consumed: int, batch: int) -> float:
    """Return the learning rate of the update with this batch, after `updates` and so many consumed samples.

    A batch that adapts counts as many updates of the policy as its samples would have been with the plan's batch, for
    which the rate is meant.
    """
    if plan.adapt is None or not plan.adapt.measures:
        return learning_rate(updates, plan.train)
    factor = lr_factor(plan.adapt, batch, plan.global_batch_size)
    return factor * learning_rate(consumed / plan.global_batch_size, plan.train)


def _down(updates: float, train: TrainConfig, share: Callable[[float], float]) -> float:
    """From `lr` to `min_lr`, of whose difference `share` says how much is left when a part of the way is done."""
    if updates >= train.lr_decay_iterations:
        return train.min_lr
    done = (updates - train.lr_warmup_iterations) / (train.lr_decay_iterations - train.lr_warmup_iterations)
    return train.min_lr + (train.lr - train.min_lr) * share(done)


def _falling(train: TrainConfig, steps: float) -> float:
    return max(train.min_lr, train.lr * math.pow(train.lr_gamma, steps))


def _step_length(train: TrainConfig) -> int:
    assert train.lr_step_iterations is not None, "checked by contract.rules"
    return train.lr_step_iterations


_POLICIES: Dict[str, Callable[[float, TrainConfig], float]] = {
    # Half a cosine (Loshchilov and Hutter 2017, equation 5, without restarts).
    COSINE: lambda updates, train: _down(updates, train, lambda done: 0.5 * (math.cos(math.pi * done) + 1.0)),
    CONSTANT: lambda _, train: train.lr,
    # torch's StepLR.
    STEP: lambda updates, train: _falling(train, (updates - train.lr_warmup_iterations) // _step_length(train)),
    # (1 - done)^power: torch's PolynomialLR, towards `min_lr`.
    POLYNOMIAL: lambda updates, train: _down(updates, train, lambda done: (1.0 - done) ** train.lr_power),
    # torch's ExponentialLR, where a step has one iteration.
    EXPONENTIAL: lambda updates, train: _falling(train, (updates - train.lr_warmup_iterations) / _step_length(train)),
    # Falls with the inverse square root (Vaswani et al. 2017, equation 3): `lr` is the rate after the warm-up.
    NOAM: lambda updates, train: max(train.min_lr, train.lr * math.sqrt(train.lr_warmup_iterations / updates)),
    # torch's LinearLR from 1 to min_lr / lr.
    LINEAR: lambda updates, train: _down(updates, train, lambda done: 1.0 - done),
}
