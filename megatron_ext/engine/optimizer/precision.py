"""Number formats of a run, and the loss scale that fp16 needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, Optional

from megatron_ext.contract.train_config import LOGMAX, TrainConfig

LOG_MOST = 16.0
"""log2 of the number above fp16's largest."""
STATE = ("scale", "good", "patience", "fast", "slow", "square", "seen")
"""What a checkpoint may keep of a scaler; the last four of `LogMaxScaler` alone."""
FAST, SLOW = 0.99, 0.999
"""How much of a running mean stays in an iteration."""


@dataclass
class LossScaler:
    """Megatron's dynamic loss scale: halved after overflows, doubled after `window` iterations without one."""

    scale: float
    dynamic: bool
    window: int = 1000
    hysteresis: int = 2
    """Overflows since the last growth that it takes to halve the scale; from then on each one does."""
    least: float = 1.0
    good: int = 0
    """Iterations since the last overflow or growth."""
    patience: int = 2
    """What is left of `hysteresis`."""

    @classmethod
    def of(cls, precision: str) -> LossScaler:
        """The scaler that a number format needs."""
        return cls(scale=2.0**32, dynamic=True) if precision == "fp16" else cls(scale=1.0, dynamic=False)

    def state(self) -> Optional[Dict[str, float]]:
        """What a checkpoint keeps; None without a dynamic scale."""
        return {"scale": self.scale, "good": self.good, "patience": self.patience} if self.dynamic else None

    def load(self, state: Optional[Dict[str, float]]) -> None:
        """Goes on from what `state` gave; begins anew if that run, or this one, had no dynamic scale."""
        if self.dynamic and state is not None:
            self.scale, self.good, self.patience = state["scale"], int(state["good"]), int(state["patience"])

    def update(self, finite: bool, largest: float = math.nan) -> None:
        """Takes note of one iteration's gradients, of which the `largest` lies so far from 0, without the scale."""
        if not self.dynamic:
            return
        if finite:
            self.good += 1
            if self.good == self.window:
                self.scale *= 2.0
                self.good, self.patience = 0, self.hysteresis
        else:
            self.good = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale / 2.0, self.least)


@dataclass
class LogMaxScaler(LossScaler):
    """OpenSeq2Seq's (Kuchaiev et al. 2018, section 5.2): the logarithms of the largest gradients are taken as normally
    distributed, and the scale is the largest with which hardly one in a thousand iterations overflows."""

    scale: float = 1.0
    dynamic: bool = True
    most: float = 2.0**24
    deviations: float = 3.09
    """Deviations of that distribution above its mean, below which 0.999 of it lie."""
    fast: float = 0.0
    slow: float = 0.0
    square: float = 0.0
    """Running means of log2 of the largest gradient, and of its square."""
    seen: int = 0
    """Iterations that these are of."""

    def state(self) -> Dict[str, float]:
        own = {"fast": self.fast, "slow": self.slow, "square": self.square, "seen": self.seen}
        return {"scale": self.scale, "good": self.good, "patience": self.patience, **own}

    def load(self, state: Optional[Dict[str, float]]) -> None:
        """Goes on from what `state` gave; begins anew from the state of another loss scale."""
        if state is not None and "seen" in state:
            self.scale, self.seen = state["scale"], int(state["seen"])
            self.fast, self.slow, self.square = state["fast"], state["slow"], state["square"]

    def update(self, finite: bool, largest: float = math.nan) -> None:
        """After an overflow, as if the largest gradient had been the largest number of fp16; none tells nothing."""
        if finite and not largest > 0:
            return
        found = math.log2(largest) if finite else LOG_MOST
        self.seen += 1
        self.fast += (1.0 - FAST) * (found - self.fast)
        self.slow += (1.0 - SLOW) * (found - self.slow)
        self.square += (1.0 - SLOW) * (found * found - self.square)
        known = 1.0 - SLOW**self.seen
        mean = self.slow / known
        deviation = math.sqrt(max(0.0, self.square / known - mean * mean))
        limit = self.fast / (1.0 - FAST**self.seen) + self.deviations * deviation
        self.scale = min(max(2.0 ** min(LOG_MOST - limit, 1000.0), self.least), self.most)


def scaler_of(train: TrainConfig) -> LossScaler:
    """What the number format of a run needs, of the kind that it wants."""
    return LogMaxScaler() if train.loss_scaler == LOGMAX else LossScaler.of(train.precision)
