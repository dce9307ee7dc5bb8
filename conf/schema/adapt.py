"""A batch that adapts while a run trains, and shares that follow measured times."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.gpu_streams import MOST
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from megatron_ext.contract.adaptive.config import ADAPTS, AdaptConfig
from megatron_ext.contract.adaptive.rules import Rungs

SMOOTHING = 4
"""Measurements that a decision takes together, where nothing else is said."""
_USED_BY = {
    "target": ("similarity", "noise"),
    "rate": ("similarity",),
    "lower": ("similarity", "noise", "goodput"),
    "upper": ("similarity", "noise", "goodput"),
    "smoothing": ("similarity", "noise", "goodput"),
    "lr_scaling": ("similarity", "noise", "goodput"),
}
"""By key, the rules that look at it."""


class Rule(StrEnum):
    """How the next global batch is found (docs/adaptive.md)."""

    none = "none"
    """It stays as it is."""
    similarity = "similarity"
    """Up or down by a rate, as the gradients of its halves are less or more alike than the target (JABAS)."""
    noise = "noise"
    """To the batch at which the halves are as alike as the target, by the measured noise scale."""
    goodput = "goodput"
    """To the batch with the most progress a second, by noise scale and measured times (Pollux)."""


class LrScaling(StrEnum):
    """How the learning rate follows the batch; `train.lr` is for `parallel.global_batch_size`."""

    none = "none"
    sqrt = "sqrt"
    """With its square root."""
    linear = "linear"


@config
class Adapt:
    rule: Rule = Rule.none
    target: float = 0.3
    """Of rule similarity and noise: how alike the gradients of both halves of a batch are to be, as a cosine."""
    lower: int | None = None
    """The smallest global batch; null: parallel.global_batch_size."""
    upper: int | None = None
    """The largest global batch; a rule needs it."""
    every: int = 100
    """Iterations between two measurements, each of which is followed by a decision."""
    rate: float = 0.1
    """Of rule similarity: by which part of itself the batch grows or shrinks."""
    smoothing: int | None = None
    """Measurements that a decision takes together; null: 1 with rule similarity, as JABAS does, else 4."""
    lr_scaling: LrScaling = LrScaling.sqrt
    rebalance: bool = False
    """Solve the shares of replicas again, from measured times, where that gains more than 3 %."""
    micro_batch_sizes: list[int] = field(default_factory=list)
    """With rebalance, sizes that micro-batches may have beside parallel.micro_batch_size, which they are multiples of:
    each replica takes the fastest one that fits its memory, as a profile or a prediction knows it."""
    streams: list[int] = field(default_factory=list)
    """With rebalance, numbers of streams that a replica may have beside parallel.streams, in data parallel plans: each
    takes what is fastest of those that fit its memory with its micro-batches."""

    def __post_init__(self) -> None:
        ranges.check("adapt", self)
        if self.rule is not Rule.none and self.upper is None:
            raise ConfigError(
                f"adapt.rule={self.rule} lets the global batch grow, and nothing says how far; give adapt.upper, in "
                "samples"
            )
        for key, rules in _USED_BY.items():
            value, default = getattr(self, key), type(self).__dataclass_fields__[key].default
            if str(self.rule) not in rules and value != default:
                raise ConfigError(
                    f"adapt.{key}={value} does nothing with adapt.rule={self.rule}; use adapt.rule="
                    f"{' or '.join(rules)}, or leave it out"
                )
        for key in ("micro_batch_sizes", "streams"):
            if getattr(self, key) and not self.rebalance:
                raise ConfigError(
                    f"adapt.{key}={getattr(self, key)} are chosen by measured times, which "
                    "adapt.rebalance=false leaves alone; use adapt.rebalance=true, or leave them out"
                )
        if not self.on and self.every != type(self).every:
            raise ConfigError(
                f"adapt.every={self.every} does nothing with adapt.rule=none and adapt.rebalance=false; give one of "
                "these, or leave it out"
            )

    @property
    def on(self) -> bool:
        """Whether anything changes."""
        return self.rule is not Rule.none or self.rebalance

    def bounds(self, global_batch_size: int) -> tuple[int, int]:
        """The smallest and the largest batch, of a run that starts with this one."""
        lower = global_batch_size if self.lower is None else self.lower
        return lower, global_batch_size if self.upper is None else self.upper

    def planned(
        self,
        global_batch_size: int,
        micro_batch_sizes: list[list[int]] | None = None,
        streams: list[list[list[int]]] | None = None,
    ) -> AdaptConfig | None:
        """What plan.json says of it; `micro_batch_sizes` are those that fit into memory, by replica, and `streams`
        those that do with each of these."""
        if not self.on:
            return None
        lower, upper = self.bounds(global_batch_size)
        usual = 1 if self.rule is Rule.similarity else SMOOTHING
        return AdaptConfig(
            rule=str(self.rule),
            target=self.target,
            lower=lower,
            upper=upper,
            every=self.every,
            rate=self.rate,
            smoothing=usual if self.smoothing is None else self.smoothing,
            lr_scaling=str(self.lr_scaling),
            rebalance=self.rebalance,
            micro_batch_sizes=micro_batch_sizes,
            streams=streams,
        )


def check(adapt: Adapt, parallel: Parallel, train: Train) -> None:
    """Whether such a plan can adapt.

    Raises:
        ConfigError: it cannot.
    """
    if not adapt.on:
        return
    wrong = f"adapt.rule={adapt.rule}" if adapt.rule is not Rule.none else "adapt.rebalance=true"
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.schedule_file={parallel.schedule_file} is for one number of micro-batches, which {wrong} "
            f"changes; use parallel.schedule={ADAPTS[0]}, or leave adapt out"
        )
    if str(parallel.schedule) not in ADAPTS:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule} does not go with {wrong}: it is not for every number of "
            f"micro-batches; use parallel.schedule={' or '.join(ADAPTS)}"
        )
    if not parallel.layout.even:
        most = max(parallel.layout.replicas)
        raise ConfigError(
            f"parallel.replicas={parallel.replicas} does not go with {wrong}, which gives each replica shares of its "
            f"own; use as many replicas on each stage: parallel.replicas=null parallel.data={most}"
        )
    if adapt.rebalance and parallel.data == 1 and not adapt.micro_batch_sizes and not adapt.streams:
        raise ConfigError(
            "adapt.rebalance=true: parallel.data=1 leaves nothing to share; use adapt.rebalance=false, or give "
            "adapt.micro_batch_sizes or adapt.streams"
        )
    size = parallel.micro_batch_size
    for other in adapt.micro_batch_sizes:
        if other <= size or other % size:
            raise ConfigError(
                f"adapt.micro_batch_sizes={adapt.micro_batch_sizes}: {other} must be a multiple of "
                f"parallel.micro_batch_size={size}, and larger, for together micro-batches make every batch; use "
                f"{max(2, -(-other // size)) * size}, or a smaller parallel.micro_batch_size"
            )
    for number in adapt.streams:
        if not 1 <= number <= MOST:
            raise ConfigError(f"adapt.streams={adapt.streams}: {number} must be a number from 1 to {MOST}")
    if adapt.rule is not Rule.none:
        _check_batch(adapt, parallel, train)


def _check_batch(adapt: Adapt, parallel: Parallel, train: Train) -> None:
    batch = parallel.global_batch_size
    lower, upper = adapt.bounds(batch)
    if not lower <= batch <= upper:
        raise ConfigError(
            f"parallel.global_batch_size={batch}, with which the run starts, must lie between adapt.lower={lower} and "
            f"adapt.upper={upper}"
        )
    size = parallel.micro_batch_size
    if batch < 2 * size:
        smaller = f"parallel.micro_batch_size={batch // 2}" if batch > 1 else "parallel.global_batch_size=2"
        raise ConfigError(
            f"parallel.global_batch_size={batch} is a single micro-batch of {size}, but adapt.rule={adapt.rule} "
            f"compares the gradients of the halves of a batch, which are whole micro-batches; use {smaller}"
        )
    try:
        Rungs.between(lower, upper, parallel.micro_batch_size, parallel.data)
    except ValueError as error:
        raise ConfigError(f"adapt.upper={upper} is too small: {error}; use a larger one") from error
    if train.epochs is None and train.samples is None:
        raise ConfigError(
            f"train.iterations={train.iterations} does not say how long a training is whose batch adapts "
            f"(adapt.rule={adapt.rule}); give train.samples or train.epochs in its place"
        )
