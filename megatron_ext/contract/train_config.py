"""What a plan says of training: the optimizer, the learning rate's policy, checkpoints and logging."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Optional

ADAMW, ADAM, SGD, LAMB = OPTIMIZERS = ("adamw", "adam", "sgd", "lamb")
COSINE, CONSTANT, STEP, POLYNOMIAL, EXPONENTIAL, NOAM, LINEAR = LR_POLICIES = (
    *("cosine", "constant", "step", "polynomial", "exponential", "noam", "linear"),
)
DECAYING = (COSINE, POLYNOMIAL, LINEAR)
"""Policies that come to `min_lr` after `lr_decay_iterations`."""
BACKOFF, LOGMAX = LOSS_SCALERS = ("backoff", "logmax")
KINDS = {
    ADAMW: ("adam_m", "adam_v"),
    ADAM: ("adam_m", "adam_v"),
    SGD: ("momentum",),
    LAMB: ("lamb_m", "lamb_v"),
}
"""By optimizer, what it keeps of each weight, under the names that checkpoints have for it."""
ONLY_WITH = {
    "loss_scaler": ("precision", ("fp16",)),
    "momentum": ("optimizer", (SGD,)),
    "nesterov": ("optimizer", (SGD,)),
    "lr_step_iterations": ("lr_policy", (STEP, EXPONENTIAL)),
    "lr_gamma": ("lr_policy", (STEP, EXPONENTIAL)),
    "lr_power": ("lr_policy", (POLYNOMIAL,)),
}
"""Options that say nothing with other optimizers or policies: the key that decides, and its values."""

EVALUATING = ("eval_iterations", "until", "best")
"""Options that say nothing without `eval_interval`."""


@dataclass(frozen=True)
class TrainConfig:
    """Optimizer, schedule and logging. Options that are at their default are not written."""

    iterations: int
    seed: int
    lr: float
    min_lr: float
    lr_warmup_iterations: int
    lr_decay_iterations: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    precision: str
    compile: bool
    log_interval: int
    load: Optional[str]
    checkpoint: bool
    save_interval: Optional[int]
    keep_checkpoints: int
    save_async: bool
    comm_timeout_s: int
    optimizer: str = ADAMW
    momentum: float = 0.9
    nesterov: bool = False
    lr_policy: str = COSINE
    lr_step_iterations: Optional[int] = None
    lr_gamma: float = 0.1
    lr_power: float = 1.0
    eval_interval: Optional[int] = None
    eval_iterations: Optional[int] = None
    until: Optional[str] = None
    best: Optional[str] = None
    loss_scaler: str = BACKOFF
    ema: Optional[float] = None
    max_cost: Optional[float] = None
    price_per_hour: Optional[float] = None
    """Of all nodes together, in dollars, where it is known; `max_cost` needs it."""
    epochs: Optional[int] = None
    """How often all training samples are gone through, where that was asked for."""
    overlap_optimizer: bool = False
    """Whether weights are updated bucket by bucket, while later buckets of gradients are summed."""
    samples: Optional[int] = None
    """Of the whole training, where these or epochs were asked for: the iterations take as many as their global batches
    allow, and the order of the samples follows from this number."""

    @property
    def length_key(self) -> str:
        """By which of its keys the length was given."""
        return "iterations" if self.samples is None else "samples" if self.epochs is None else "epochs"

    def progress(self, consumed: int) -> str:
        """How far a run with so many consumed samples is, in the terms of its length; empty for iterations."""
        if self.samples is None:
            return ""
        if self.epochs is None:
            return f"{consumed:,} of {self.samples:,} samples"
        return f"epoch {consumed * self.epochs / self.samples:.2f} of {self.epochs}"


OPTIONS = {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}
