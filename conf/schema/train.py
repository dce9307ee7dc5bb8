"""What training does: optimizer, schedule of the learning rate, checkpoints, logging."""

from __future__ import annotations

from enum import StrEnum

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config


class Precision(StrEnum):
    """Number format of the model's weights and activations; optimizer state and gradient sums are always fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@config
class Train:
    iterations: int = MISSING
    seed: int = 1234
    lr: float = 1.5e-4
    min_lr: float = 1.0e-5
    lr_warmup_iterations: int = 0
    lr_decay_iterations: int | None = None
    """Length of warm-up and cosine together; null: all iterations."""
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1.0e-8
    clip_grad: float = 1.0
    """Largest norm of the gradient over all ranks; 0 does not clip."""
    precision: Precision = Precision.fp32
    compile: bool = False
    """Compile the transformer layers with torch.compile."""
    log_interval: int = 10
    load: str | None = None
    """A run folder, its checkpoints folder, or one of the folders in it: goes on from that checkpoint.

    A run that has a checkpoint of its own, because it was interrupted, goes on from its newest one instead.
    """
    checkpoint: bool = True
    """Save weights and optimizer state after the last iteration."""
    save_interval: int | None = None
    """Save them also each time after so many iterations; null: only at the end."""
    keep_checkpoints: int = 2
    """Older ones are deleted once a new one is on disk."""
    save_async: bool = False
    """Train on while a copy in the node's memory is written."""
    comm_timeout_s: int = 60
    """A rank that waits longer than this for a message of another one fails; on a GPU, one of whose passes takes longer
    with the wait for its message. Making the weights, indexing data, and reading and writing checkpoints may take up to
    two hours."""

    def __post_init__(self) -> None:
        ranges.check("train", self)
        _check_saving(self)
        _check_learning_rate(self)


def _check_saving(train: Train) -> None:
    if train.save_interval is None:
        return
    if not train.checkpoint:
        raise ConfigError(
            f"train.save_interval={train.save_interval} saves checkpoints, but train.checkpoint=false saves none; use "
            "train.checkpoint=true, or train.save_interval=null"
        )


def _check_learning_rate(train: Train) -> None:
    if not 0 <= train.min_lr <= train.lr:
        raise ConfigError(f"train.min_lr={train.min_lr} must be between 0 and train.lr={train.lr}")
    key = "iterations" if train.lr_decay_iterations is None else "lr_decay_iterations"
    decay = getattr(train, key)
    if not 0 <= train.lr_warmup_iterations < decay:
        raise ConfigError(
            f"train.lr_warmup_iterations={train.lr_warmup_iterations} must be at least 0 and less than "
            f"train.{key}={decay}"
        )
