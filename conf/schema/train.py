"""What training does: optimizer, schedule of the learning rate, checkpoints, logging."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from megatron_ext.contract.goal import METRICS, Best, Target
from megatron_ext.contract.train_config import DECAYING, EVALUATING, KINDS, ONLY_WITH, OPTIONS

if TYPE_CHECKING:
    FlagOrAuto = bool | str
else:
    FlagOrAuto = Any  # omegaconf 2.3 has no unions of these

LENGTHS = ("iterations", "epochs", "samples")
"""Keys that say how long a training is; a user gives one of them."""


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
    iterations: int | None = None
    """Updates of the weights, each after a global batch. With epochs or samples a launch finds how many."""
    epochs: int | None = None
    """In the place of iterations: all training samples so many times."""
    samples: int | None = None
    """In the place of iterations: so many samples, and not one more. Of a training whose epochs are given, a launch
    finds it."""
    seed: int = 1234
    """Of initial weights, the order of samples, dropout and changes of images."""
    lr: float = 1.5e-4
    """The learning rate after its warm-up."""
    min_lr: float = 1.0e-5
    """The learning rate does not fall below it."""
    lr_warmup_iterations: int = 0
    """In which the learning rate rises from 0."""
    lr_decay_iterations: int | None = None
    """Length of warm-up and cosine together; null: all iterations."""
    lr_policy: LrPolicy = LrPolicy.cosine
    lr_step_iterations: int | None = None
    """Of lr_policy step and exponential: the learning rate takes so many iterations for each factor lr_gamma."""
    lr_gamma: float = 0.1
    """Of lr_policy step and exponential: the factor."""
    lr_power: float = 1.0
    """Of lr_policy polynomial."""
    optimizer: Optimizer = Optimizer.adamw
    momentum: float = 0.9
    """Of optimizer sgd."""
    nesterov: bool = False
    """Of optimizer sgd."""
    weight_decay: float = 0.01
    """Of all weights but biases and norms."""
    adam_beta1: float = 0.9
    """The part of the mean gradient that stays in an update."""
    adam_beta2: float = 0.999
    """The part of the mean squared gradient that stays in an update."""
    adam_eps: float = 1.0e-8
    """Added to the root that an update is divided by."""
    clip_grad: float = 1.0
    """Largest norm of the gradient over all ranks; 0 does not clip."""
    overlap_optimizer: FlagOrAuto = "auto"
    """Update weights bucket by bucket, while later gradients are still summed: true, false, or auto, which does so
    wherever it changes no result and can gain (docs/training.md)."""
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
    """Iterations between two lines of the log."""
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
        _check_length(self)
        _check_saving(self)
        _check_learning_rate(self)
        _check_options(self)
        _check_goal(self)
        if not isinstance(self.overlap_optimizer, bool) and self.overlap_optimizer != "auto":
            raise ConfigError(f"train.overlap_optimizer={self.overlap_optimizer} must be true, false or auto")

    @property
    def length(self) -> str:
        """What was given of `LENGTHS`, in words."""
        key = next(key for key in ("epochs", "samples", "iterations") if getattr(self, key) is not None)
        return f"train.{key}={getattr(self, key)}"

    @property
    def kept_values(self) -> int:
        """Numbers in fp32 that training keeps of every weight beside itself: moments, and its average."""
        without = self.optimizer is Optimizer.sgd and not self.momentum
        return (0 if without else len(KINDS[str(self.optimizer)])) + (self.ema is not None)

    @property
    def last_iteration(self) -> int:
        """Of a training whose length is in iterations, or was found by a launch."""
        assert self.iterations is not None, f"{self.length}: a launch counts its iterations first"
        return self.iterations


def _check_length(train: Train) -> None:
    """A launch fills in what follows from epochs or samples: `conf.training_length` says what a user may give."""
    if all(getattr(train, key) is None for key in LENGTHS):
        raise ConfigError(
            "the training has no end: give train.iterations, or in its place train.epochs or train.samples"
        )
    if train.epochs is not None and train.samples is not None:
        if train.iterations is None:
            raise ConfigError(
                f"train.epochs={train.epochs} and train.samples={train.samples} both say how long the training is; "
                "give one of them"
            )
        if train.samples % train.epochs:
            raise ConfigError(f"train.samples={train.samples} must be a multiple of train.epochs={train.epochs}")


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
        if train.lr_decay_iterations is not None:
            raise ConfigError(
                f"train.lr_decay_iterations={train.lr_decay_iterations} does nothing with train.lr_policy="
                f"{train.lr_policy}, which has no end; use train.lr_decay_iterations=null, or train.lr_policy="
                f"{' or '.join(DECAYING)}"
            )
        _check_policy(train)
        return
    key = "iterations" if train.lr_decay_iterations is None else "lr_decay_iterations"
    decay = getattr(train, key)
    if decay is None:  # not before a launch has counted its iterations
        return
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
