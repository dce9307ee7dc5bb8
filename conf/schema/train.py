"""What training does: optimizer, schedule of the learning rate, checkpoints, logging."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from conf.errors import ConfigError, reworded
from conf.schema.values import ranges
from conf.schema.values.ranges import config
from megatron_ext.contract import train_config
from megatron_ext.contract.goal import Best, Target
from megatron_ext.contract.models.model import family_named
from megatron_ext.contract.train_config import (
    AUTO,
    DECAYING,
    KINDS,
    LossScaler,
    LrPolicy,
    Optimizer,
    Precision,
    broken_by_training,
)

__all__ = ["LossScaler", "LrPolicy", "Optimizer", "Precision", "Train"]

SAVES, KEEPS = "save_interval", "save_memory"
INTERVALS = (SAVES, "eval_interval", "log_interval")
"""Keys that take iterations, or epochs such as `1epoch`, whose iterations a launch counts."""
_EPOCHS = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?epochs?")
LENGTHS = ("iterations", "epochs", "samples")
"""Keys that say how long a training is; a user gives one of them."""


@config
class Train(train_config.Train):
    def __post_init__(self) -> None:
        _check_intervals(self)
        ranges.check("train", self)
        _check_length(self)
        if self.save_interval is not None and not self.auto_interval and not self.checkpoint:
            raise ConfigError(
                f"train.save_interval={self.save_interval} saves checkpoints, but train.checkpoint=false turns them "
                "off; use train.checkpoint=true, or leave train.save_interval out"
            )
        if self.lr_policy not in DECAYING and self.lr_decay_iterations is not None:
            raise ConfigError(
                f"train.lr_decay_iterations={self.lr_decay_iterations} has no effect with train.lr_policy="
                f"{self.lr_policy}, which has no end; use train.lr_decay_iterations=null, or train.lr_policy="
                f"{' or '.join(DECAYING)}"
            )
        for broken in broken_by_training(partial(getattr, self)):
            raise ConfigError(broken)
        _check_goal(self)
        if not isinstance(self.overlap_optimizer, bool) and self.overlap_optimizer != "auto":
            raise ConfigError(f"train.overlap_optimizer={self.overlap_optimizer} must be true, false or auto")

    @property
    def length(self) -> str:
        """What was given of `LENGTHS`, in words."""
        key = next(key for key in ("epochs", "samples", "iterations") if getattr(self, key) is not None)
        return f"train.{key}={getattr(self, key)}"

    def checkpoint_bytes(self, parameters: int) -> int:
        """Bytes of a checkpoint: weights and what the optimizer keeps of them, fp32."""
        return 4 * (1 + len(KINDS[str(self.optimizer)]) + (self.ema is not None)) * parameters

    @property
    def auto_interval(self) -> bool:
        """Whether a run chooses by itself how often it saves."""
        return str(self.save_interval) == AUTO

    @property
    def in_epochs(self) -> dict[str, Fraction]:
        """The intervals that are still in epochs, by key."""
        found = {key: _EPOCHS.fullmatch(str(getattr(self, key))) for key in INTERVALS}
        return {key: Fraction(match[1]) for key, match in found.items() if match is not None}

    def with_intervals(self, iterations: Mapping[str, int]) -> Train:
        """The same with some of `INTERVALS`, by key, in iterations."""
        values: dict[str, Any] = dict(iterations)
        return replace(self, **values)

    @property
    def kept_values(self) -> int:
        """Numbers in fp32 that training keeps of every weight beside itself: moments, its average, and what all islands
        have in common."""
        without = self.optimizer is Optimizer.sgd and not self.momentum
        outer = 0 if self.sync_every is None else 1 + (self.outer_momentum > 0)
        return (0 if without else len(KINDS[self.optimizer])) + (self.ema is not None) + outer

    @property
    def last_iteration(self) -> int:
        """Return the last iteration of a training whose length is in iterations, or was found by a launch."""
        assert self.iterations is not None, f"{self.length}: only a launch counts its iterations"
        return self.iterations


def _check_intervals(train: Train) -> None:
    epochs = train.in_epochs
    for key in INTERVALS:
        value: object = getattr(train, key)
        sound = type(value) is int or (value is None and key != "log_interval") or (value == AUTO and key == SAVES)
        if not (epochs[key] > 0 if key in epochs else sound):
            null = "" if key == "log_interval" else ", or auto, or null" if key == SAVES else ", or null"
            raise ConfigError(
                f"train.{key}={value} must be a whole number of iterations, or of epochs, such as 1epoch{null}"
            )
    memory: object = train.save_memory
    if not (memory in (None, AUTO) or type(memory) is int):
        raise ConfigError(f"train.{KEEPS}={memory} must be a whole number of iterations, or auto, or null")


def _check_length(train: Train) -> None:
    """A launch fills in what follows from epochs or samples: `conf.compose` says what a user may give."""
    if all(getattr(train, key) is None for key in LENGTHS):
        raise ConfigError("the training has no length: give train.iterations, train.epochs or train.samples")
    if train.epochs is not None and train.samples is not None and train.iterations is None:
        raise ConfigError(
            f"train.epochs={train.epochs} and train.samples={train.samples} both set the length of the training; "
            f"give one of them"
        )


def _check_goal(train: Train) -> None:
    kinds: tuple[type[Target] | type[Best], ...] = (Target, Best)
    for kind, key, text in zip(kinds, ("until", "best"), (train.until, train.best), strict=True):
        with reworded(ConfigError, f"train.{key}={text} must be ", of=ValueError):
            if text is not None:
                kind.parse(text)
    for key in ("best", "max_cost"):
        if (value := getattr(train, key)) is not None and not train.checkpoint:
            raise ConfigError(
                f"train.{key}={value} needs checkpoints, but train.checkpoint=false saves none; use "
                f"train.checkpoint=true, or train.{key}=null"
            )


def check_metrics(train: Train, family: str) -> None:
    """Raises ConfigError for a metric that no evaluation of such a model gives, as far as that is known."""
    measured = family_named(family).metrics
    for key, wanted in (
        ("until", train.until and Target.parse(train.until)),
        ("best", train.best and Best.parse(train.best)),
    ):
        if wanted and measured is not None and wanted.metric not in measured:
            raise ConfigError(
                f"train.{key}={getattr(train, key)}: an evaluation with model.family={family} measures "
                f"{' and '.join(measured)}; use one of these"
            )
