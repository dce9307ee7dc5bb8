"""The keys of training: optimizer, learning rate, checkpoints and logging, and what a plan has of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator, List, Mapping, Optional, Tuple, Union

from megatron_ext.contract.keys import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    PART,
    Get,
    Range,
    Word,
    between,
    from_0,
    left_out,
    option,
    positive,
    shown,
)

if TYPE_CHECKING:
    FlagOrAuto = Union[bool, str]
    Interval = int
else:
    FlagOrAuto = Interval = Any  # omegaconf 2.3 has no unions of these


AUTO = "auto"
"""What leaves a value to tdpp."""


class Precision(Word):
    """Number format of the model's weights and activations; optimizer state is always fp32, and so are gradient
    sums, unless `parallel.reduce_dtype` says otherwise."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Optimizer(Word):
    """How the weights follow their gradients (docs/training.md); biases and norms never decay."""

    adamw = "adamw"
    """Adam with decoupled weight decay."""
    adam = "adam"
    """Adam with L2 weight decay in the gradients."""
    sgd = "sgd"
    """SGD with momentum, optionally Nesterov's, and L2 weight decay in the gradients."""
    lamb = "lamb"
    """LAMB: Adam with updates scaled to the norm of each weight matrix, for large batches."""


class LrPolicy(Word):
    """How the learning rate goes on after its warm-up (docs/training.md)."""

    cosine = "cosine"
    constant = "constant"
    step = "step"
    polynomial = "polynomial"
    exponential = "exponential"
    noam = "noam"
    linear = "linear"


class LossScaler(Word):
    """How fp16's loss scale is found (docs/training.md)."""

    backoff = "backoff"
    """Halved after overflows, doubled after 1000 iterations without one."""
    logmax = "logmax"
    """From the distribution of the largest gradients, before they overflow."""


ADAMW, ADAM, SGD, LAMB = OPTIMIZERS = tuple(Optimizer)
COSINE, CONSTANT, STEP, POLYNOMIAL, EXPONENTIAL, NOAM, LINEAR = LrPolicy
BACKOFF, LOGMAX = LossScaler
DECAYING = (COSINE, POLYNOMIAL, LINEAR)
"""Policies that come to `min_lr` after `lr_decay_iterations`."""
KINDS: Mapping[str, Tuple[str, ...]] = {
    ADAMW: ("adam_m", "adam_v"),
    ADAM: ("adam_m", "adam_v"),
    SGD: ("momentum",),
    LAMB: ("lamb_m", "lamb_v"),
}
"""What each optimizer keeps of a weight, under the names that checkpoints have for it."""
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
class Adapters:
    """Which adapters are trained, by the options that say so."""

    lora_rank: int
    lora_alpha: float
    lora_targets: Optional[List[str]]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Train:
    """The keys of training as a user gives them."""

    iterations: Optional[int] = option(None, COUNT, written=True)
    """Number of weight updates, each after one global batch. With epochs or samples, a launch computes it."""
    epochs: Optional[int] = option(None, COUNT)
    """Instead of iterations: how often all training samples are used."""
    samples: Optional[int] = option(None, Range(1, 10**15))
    """Instead of iterations: the exact number of samples. With epochs, a launch computes it."""
    seed: int = option(1234, between(0, 2**32 - 1), written=True)
    """Seed of initial weights, the order of samples, dropout and image augmentation."""
    lr: float = option(1.5e-4, positive(1e6), written=True)
    """The learning rate after its warm-up."""
    min_lr: float = option(1.0e-5, from_0(1e6), written=True)
    """Lower bound of the learning rate."""
    lr_warmup_iterations: int = option(0, NOT_NEGATIVE, written=True)
    """Iterations in which the learning rate rises from 0."""
    lr_decay_iterations: Optional[int] = option(None, COUNT, written=True)
    """Length of warm-up and cosine together; null: all iterations."""
    lr_policy: LrPolicy = LrPolicy.cosine
    lr_step_iterations: Optional[int] = option(None, COUNT)
    """With lr_policy step or exponential: iterations per factor lr_gamma of the learning rate."""
    lr_gamma: float = option(0.1, positive(1.0))
    """With lr_policy step or exponential: the factor."""
    lr_power: float = option(1.0, positive(100.0))
    """With lr_policy polynomial: the exponent."""
    optimizer: Optimizer = Optimizer.adamw
    momentum: float = option(0.9, FRACTION)
    """With optimizer sgd: its momentum."""
    nesterov: bool = False
    """With optimizer sgd: whether the momentum is Nesterov's."""
    weight_decay: float = option(0.01, from_0(1e6), written=True)
    """Weight decay of all weights except biases and norms."""
    adam_beta1: float = option(0.9, FRACTION, written=True)
    """Decay rate of the mean of the gradient."""
    adam_beta2: float = option(0.999, FRACTION, written=True)
    """Decay rate of the mean of the squared gradient."""
    adam_eps: float = option(1.0e-8, positive(1.0), written=True)
    """Added to the denominator of an update."""
    clip_grad: float = option(1.0, from_0(), written=True)
    """Clip the gradient to this norm over all ranks; 0: do not clip."""
    overlap_optimizer: FlagOrAuto = "auto"
    """Update weights bucket by bucket while later gradients are still being summed: true, false, or auto, which does it
    wherever it can gain without changing results (docs/training.md)."""
    precision: Precision = option(Precision.fp32, written=True)
    compile: bool = option(False, written=True)
    """Compile the transformer layers with torch.compile."""
    eval_interval: Optional[Interval] = option(None, COUNT)
    """Iterations, or epochs such as 1epoch, between evaluations on the valid split; the last iteration is evaluated
    too. null: never."""
    eval_iterations: Optional[int] = option(None, COUNT)
    """Global batches per evaluation, always the same ones; null: the whole split."""
    until: Optional[str] = None
    """Stop once an evaluation reaches this, such as 'loss<=2.5'."""
    best: Optional[str] = None
    """Keep the checkpoint whose evaluation is best by this metric, such as loss, or max:METRIC for one of your own."""
    loss_scaler: LossScaler = LossScaler.backoff
    """With precision fp16: how the scale of the loss changes."""
    ema: Optional[float] = option(None, PART)
    """Keep an exponential moving average of the weights, used by evaluations, with this decay rate, such as 0.999."""
    sync_every: Optional[int] = option(None, COUNT)
    """Replicas, or the groups of them in parallel.islands, train by themselves and step together every this many
    iterations, along the mean of what each has moved (DiLoCo; docs/engine.md). null: all sum their gradients in every
    iteration."""
    outer_lr: float = option(0.7, positive(10.0))
    """With sync_every: the learning rate of that step; 1 with outer_momentum=0 averages the weights."""
    outer_momentum: float = option(0.9, FRACTION)
    """With sync_every: the Nesterov momentum of that step."""
    lora_rank: Optional[int] = option(None, Range(1, 2**16))
    """Train adapters of this rank beside the matrices of the layers, and nothing else (LoRA; docs/fine-tuning.md). For
    huggingface."""
    lora_alpha: Optional[float] = option(None, positive(1e6))
    """What adapters add is scaled by this divided by lora_rank; null: twice the rank."""
    lora_targets: Optional[List[str]] = option(None)
    """The names of the matrices that get adapters, such as [q_proj,v_proj]; null: all linear ones in the layers."""
    max_cost: Optional[float] = option(None, positive(1e12))
    """Save and end when the nodes, by cluster.groups.<group>.price_per_hour, and what they send over links with a
    price_per_gb have cost this many dollars."""
    log_interval: Interval = option(10, COUNT, written=True)
    """Iterations, or epochs such as 1epoch, between two lines of the log."""
    load: Optional[str] = option(None, written=True)
    """Checkpoint to continue from: a run folder, its checkpoints folder, or one of the folders in it.

    A run that was interrupted and has its own checkpoints continues from its newest one instead.
    """
    checkpoint: bool = option(True, written=True)
    """Save weights and optimizer state after the last iteration."""
    save_interval: Optional[Interval] = option(AUTO, COUNT, written=True)
    """Also save every this many iterations, or epochs such as 1epoch; auto: as often as the time of a save and the
    failures of such nodes make best (docs/checkpoints.md); null: only at the end."""
    save_memory: Optional[Interval] = option(None, COUNT)
    """With elastic.enabled: keep a checkpoint in the memory of two nodes every so many iterations, from which the run
    goes on when one of them is lost; auto: as often as is best (docs/elastic.md). null: none."""
    keep_checkpoints: int = option(2, Range(1, 10**6), written=True)
    """Number of checkpoints to keep; older ones are deleted once a new one is on disk."""
    save_async: bool = option(False, written=True)
    """Continue training while a copy of the checkpoint in the node's memory is written."""
    comm_timeout_s: int = option(60, Range(1, 10**7), written=True)
    """A rank fails if it waits longer than this for a message of another rank; on a GPU, if a pass takes longer
    including the wait for its message. Creating weights, indexing data, and reading and writing checkpoints may take up
    to two hours."""

    @property
    def adapters(self) -> Optional[Adapters]:
        """What alone is trained of a model whose own weights stay as they are; None: all weights."""
        if self.lora_rank is None:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        targets = None if self.lora_targets is None else sorted({*self.lora_targets})
        return Adapters(self.lora_rank, alpha, targets)


@dataclass(frozen=True)
class TrainConfig(Train):
    """What a plan says of training: the keys with what a launch has found for epochs, intervals and `auto`."""

    iterations: int = 0
    lr_decay_iterations: int = 0
    overlap_optimizer: bool = False
    """Whether weights are updated bucket by bucket, while later buckets of gradients are summed."""
    eval_interval: Optional[int] = None
    log_interval: int = 10
    save_interval: Optional[int] = None
    save_memory: Optional[int] = option(None, NOT_NEGATIVE)
    """Iterations; 0 for `auto`."""
    mtbf_s: Optional[float] = option(None, positive(1e12))
    """With `save_interval=auto`, which leaves no interval here, or `save_memory=auto`: the seconds after which one of
    the run's nodes fails, on average."""
    price_per_hour: Optional[float] = option(None, from_0())
    """The price of all nodes together, in dollars, where it is known; `max_cost` needs it."""
    traffic_price: Optional[float] = option(None, from_0())
    """With `max_cost`: dollars for what an iteration sends between groups of nodes, where that has a price."""

    @property
    def saves_by_itself(self) -> bool:
        """Whether the run decides when it saves."""
        return self.checkpoint and self.save_interval is None and self.mtbf_s is not None

    @property
    def keeps_by_itself(self) -> bool:
        """Whether the run decides when it saves into memory."""
        return self.save_memory == 0

    @property
    def length_key(self) -> str:
        """The key by which the length was given."""
        return "iterations" if self.samples is None else "samples" if self.epochs is None else "epochs"

    def progress(self, consumed: int) -> str:
        """How far a run with so many consumed samples is, in the terms of its length; empty for iterations."""
        if self.samples is None:
            return ""
        if self.epochs is None:
            return f"{consumed:,} of {self.samples:,} samples"
        return f"epoch {consumed * self.epochs / self.samples:.2f} of {self.epochs}"


OPTIONS = left_out(TrainConfig)


def broken_by_training(get: Get) -> Iterator[str]:
    """Every rule that keys of `train` break together, as a message; each key alone is known to be right. `get` gives
    the value of a key, or what it is to be where there is none."""
    epochs, samples = get("epochs", None), get("samples", None)
    if epochs is not None and samples is not None and samples % epochs:
        yield f"train.samples={samples} must be a multiple of train.epochs={epochs}"
    yield from _broken_learning_rate(get)
    if get("nesterov", False) and not get("momentum", OPTIONS["momentum"]):
        yield (
            "train.nesterov=true looks ahead along the momentum, but train.momentum=0; use train.momentum=0.9, or "
            "train.nesterov=false"
        )
    for key, (decider, allowed) in ONLY_WITH.items():  # what nothing looks at would be forgotten in silence
        value, decided = get(key, OPTIONS[key]), get(decider, OPTIONS.get(decider))
        if decided not in allowed and value != OPTIONS[key]:
            yield (
                f"train.{key}={shown(value)} has no effect with train.{decider}={decided}; use train.{decider}="
                f"{' or '.join(allowed)}, or leave it out"
            )
    yield from _broken_adapters(get)
    yield from _broken_islands(get)
    if get("eval_interval", None) is None:
        for key in EVALUATING:
            if get(key, None) is not None:
                yield (
                    f"train.{key}={get(key, None)} needs evaluations; set train.eval_interval, in iterations, such as "
                    "100"
                )


def _broken_adapters(get: Get) -> Iterator[str]:
    rank = get("lora_rank", None)
    for key in ("lora_alpha", "lora_targets"):
        value = get(key, None)
        if rank is None and value is not None:
            yield f"train.{key}={shown(value)} needs adapters; set train.lora_rank, such as 16"
    if rank is not None and get("load", None) is None:
        yield (
            f"train.lora_rank={rank} trains adapters of a model whose own weights stay as they are; set train.load to "
            "the folder of published weights, or leave train.lora_rank out"
        )
    targets = get("lora_targets", None)
    if targets is not None and not (targets and all(targets)):
        yield f"train.lora_targets={shown(list(targets))} must name matrices, such as [q_proj,v_proj]; null takes all"


def _broken_islands(get: Get) -> Iterator[str]:
    every = get("sync_every", None)
    if every is None:
        for key in ("outer_lr", "outer_momentum"):
            if get(key, OPTIONS[key]) != OPTIONS[key]:
                yield (
                    f"train.{key}={get(key, None):g} is for islands that train by themselves; set train.sync_every, "
                    "such as 50, or leave it out"
                )
        return
    if get("ema", None) is not None:
        yield (
            f"train.ema={get('ema', None):g} cannot be combined with train.sync_every={every}: evaluations take the "
            "weights after the islands' last common step; use train.ema=null"
        )
    if get("precision", Precision.fp32) == Precision.fp16:
        yield (
            f"train.precision=fp16 cannot be combined with train.sync_every={every}: each island would skip other "
            "iterations; use train.precision=bf16"
        )


def _broken_learning_rate(get: Get) -> Iterator[str]:
    lr, min_lr, warmup = get("lr", math.inf), get("min_lr", 0.0), get("lr_warmup_iterations", 0)
    policy, every = get("lr_policy", COSINE), get("lr_step_iterations", None)
    if not 0 <= min_lr <= lr:
        yield f"train.min_lr={min_lr} must be between 0 and train.lr={lr}"
    if policy in DECAYING:
        key = "iterations" if get("lr_decay_iterations", None) is None else "lr_decay_iterations"
        decay = get(key, None)  # null before a launch has counted its iterations
        if decay is not None and not 0 <= warmup < decay:
            yield (
                f"train.lr_warmup_iterations={warmup} must be at least 0 and less than train.{key}={decay}; use "
                f"train.lr_warmup_iterations={decay // 10}, or train for longer"
            )
    if policy == NOAM and warmup < 1:
        yield (
            f"train.lr_policy=noam needs a warm-up, but train.lr_warmup_iterations={warmup}; give it at least 1, such "
            "as 4000"
        )
    if policy in (STEP, EXPONENTIAL) and every is None:
        yield (
            f"train.lr_policy={policy} multiplies the learning rate by train.lr_gamma="
            f"{get('lr_gamma', OPTIONS['lr_gamma']):g} every train.lr_step_iterations; give that number"
        )
