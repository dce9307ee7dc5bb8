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
    """Of all nodes together, in dollars; given with `max_cost`."""


OPTIONS = {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}
