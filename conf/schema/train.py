"""What training does: optimizer, schedule of the learning rate, checkpoints, logging."""

from __future__ import annotations

from enum import StrEnum

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from megatron_ext.contract.goal import METRICS, Best, Target
from megatron_ext.contract.train_config import DECAYING, EVALUATING, ONLY_WITH, OPTIONS


class Precision(StrEnum):
    """Number format of the model's weights and activations; optimizer state and gradient sums are always fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Optimizer(StrEnum):
    """How the weights follow their gradients (docs/training.md); biases and norms never decay."""

    adamw = "adamw"
    """Adam with decoupled weight decay."""
    adam = "adam"
    """Adam whose gradients carry the weight decay (L2)."""
    sgd = "sgd"
    """With momentum, and Nesterov's where asked for; the gradients carry the weight decay."""
    lamb = "lamb"
    """Adam whose updates are scaled to the norm of each weight matrix, for large batches."""


class LrPolicy(StrEnum):
    """How the learning rate goes on after its warm-up (docs/training.md)."""

    cosine = "cosine"
    constant = "constant"
    step = "step"
    polynomial = "polynomial"
    exponential = "exponential"
    noam = "noam"
    linear = "linear"


class LossScaler(StrEnum):
    """How fp16's loss scale is found (docs/training.md)."""

    backoff = "backoff"
    """Halved after overflows, doubled after 1000 iterations without one."""
    logmax = "logmax"
    """From the distribution of the largest gradients, before they overflow."""


@config
class Train:
    iterations: int = MISSING
    seed: int = 1234
    lr: float = 1.5e-4
    min_lr: float = 1.0e-5
    lr_warmup_iterations: int = 0
    lr_decay_iterations: int | None = None
    """Length of warm-up and cosine together; null: all iterations."""
    lr_policy: LrPolicy = LrPolicy.cosine
    lr_step_iterations: int | None = None
    """Of lr_policy step and exponential: the learning rate takes so many iterations for each factor lr_gamma."""
    lr_gamma: float = 0.1
    lr_power: float = 1.0
    """Of lr_policy polynomial."""
    optimizer: Optimizer = Optimizer.adamw
    momentum: float = 0.9
    """Of optimizer sgd."""
    nesterov: bool = False
    """Of optimizer sgd."""
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1.0e-8
    clip_grad: float = 1.0
    """Largest norm of the gradient over all ranks; 0 does not clip."""
    precision: Precision = Precision.fp32
    compile: bool = False
    """Compile the transformer layers with torch.compile."""
    eval_interval: int | None = None
    """Evaluate on the valid split after so many iterations, and after the last one; null: never."""
    eval_iterations: int | None = None
    """Global batches of that split in an evaluation, always the same ones; null: the whole split."""
    until: str | None = None
    """End where an evaluation has reached this, such as 'loss<=2.5'."""
    best: str | None = None
    """Keep the checkpoint whose evaluation is best by this metric, such as loss, or max:METRIC for one of your own."""
    loss_scaler: LossScaler = LossScaler.backoff
    """Of precision fp16."""
    ema: float | None = None
    """Keep an average of the weights, which evaluations take: this part of it stays in an update, such as 0.999."""
    max_cost: float | None = None
    """Save and end when the nodes have cost so many dollars, by cluster.groups.<group>.price_per_hour."""
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
        _check_options(self)
        _check_goal(self)


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
    if str(train.lr_policy) not in DECAYING:
        _check_policy(train)
        return
    key = "iterations" if train.lr_decay_iterations is None else "lr_decay_iterations"
    decay = getattr(train, key)
    if not 0 <= train.lr_warmup_iterations < decay:
        raise ConfigError(
            f"train.lr_warmup_iterations={train.lr_warmup_iterations} must be at least 0 and less than "
            f"train.{key}={decay}"
        )


def _check_policy(train: Train) -> None:
    """Of a policy that goes on without end."""
    if train.lr_policy is LrPolicy.noam and train.lr_warmup_iterations < 1:
        raise ConfigError(
            f"train.lr_policy=noam falls from the end of the warm-up on, but train.lr_warmup_iterations="
            f"{train.lr_warmup_iterations}; give it at least 1, such as 4000"
        )
    if train.lr_policy in (LrPolicy.step, LrPolicy.exponential) and train.lr_step_iterations is None:
        raise ConfigError(
            f"train.lr_policy={train.lr_policy} multiplies the learning rate by train.lr_gamma={train.lr_gamma:g} each "
            "time train.lr_step_iterations have passed; give that number"
        )


def _check_options(train: Train) -> None:
    """An option that another optimizer or policy alone looks at would be forgotten in silence."""
    if train.nesterov and not train.momentum:
        raise ConfigError(
            "train.nesterov=true looks ahead along the momentum, but train.momentum=0; use train.momentum=0.9, or "
            "train.nesterov=false"
        )
    for key, (decider, allowed) in ONLY_WITH.items():
        value, decided = getattr(train, key), str(getattr(train, decider))
        if decided not in allowed and value != OPTIONS[key]:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"train.{key}={shown} does nothing with train.{decider}={decided}; use train.{decider}="
                f"{' or '.join(allowed)}, or leave it out"
            )


def _check_goal(train: Train) -> None:
    for key in EVALUATING:
        if train.eval_interval is None and (value := getattr(train, key)) is not None:
            raise ConfigError(
                f"train.{key}={value} is of evaluations, and there are none without train.eval_interval; give it a "
                "number of iterations, such as 100"
            )
    kinds: tuple[type[Target] | type[Best], ...] = (Target, Best)
    for kind, key, text in zip(kinds, ("until", "best"), (train.until, train.best), strict=True):
        try:
            if text is not None:
                kind.parse(text)
        except ValueError as rule:
            raise ConfigError(f"train.{key}={text} must be {rule}") from rule
    for key in ("best", "max_cost"):
        if (value := getattr(train, key)) is not None and not train.checkpoint:
            raise ConfigError(
                f"train.{key}={value} needs checkpoints, but train.checkpoint=false saves none; use "
                f"train.checkpoint=true, or train.{key}=null"
            )


def check_metrics(train: Train, family: str) -> None:
    """Raises ConfigError for a metric that no evaluation of such a model gives, as far as that is known."""
    for key, wanted in (
        ("until", train.until and Target.parse(train.until)),
        ("best", train.best and Best.parse(train.best)),
    ):
        if wanted and family in METRICS and wanted.metric not in METRICS[family]:
            raise ConfigError(
                f"train.{key}={getattr(train, key)}: an evaluation with model.family={family} gives "
                f"{' and '.join(METRICS[family])}; use one of these"
            )
