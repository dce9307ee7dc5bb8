"""Number formats of a run, and the loss scale that fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional


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

    def update(self, finite: bool) -> None:
        """Takes note of one iteration's gradients."""
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
