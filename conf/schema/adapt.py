"""A batch that adapts while a run trains, and shares that follow measured times."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from conf.errors import ConfigError
from conf.schema.config_class import config
from conf.schema.values import ranges
from megatron_ext.contract.adaptive.config import AdaptConfig

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
    """Keep the batch."""
    similarity = "similarity"
    """Grow or shrink it by a fixed rate, depending on how alike the gradients of its halves are (JABAS)."""
    noise = "noise"
    """Compute the batch whose halves are as alike as the target, from the measured noise scale."""
    goodput = "goodput"
    """Compute the batch with the most progress per second, from noise scale and measured times (Pollux)."""


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
    """With rule similarity or noise: the target cosine between the gradients of the two halves of a batch."""
    lower: int | None = None
    """The smallest global batch; null: parallel.global_batch_size."""
    upper: int | None = None
    """The largest global batch; required by every rule."""
    every: int = 100
    """Iterations between two measurements, each of which is followed by a decision."""
    rate: float = 0.1
    """With rule similarity: the fraction by which the batch grows or shrinks."""
    smoothing: int | None = None
    """Measurements that a decision combines; null: 1 with rule similarity, as in JABAS, else 4."""
    lr_scaling: LrScaling = LrScaling.sqrt
    rebalance: bool = False
    """Recompute the shares of the replicas from measured times whenever that gains more than 3 %."""
    micro_batch_sizes: list[int] = field(default_factory=list)
    """With rebalance, further micro-batch sizes, all multiples of parallel.micro_batch_size. Each replica takes the
    fastest one that fits its memory, by a profile or a prediction."""
    streams: list[int] = field(default_factory=list)
    """With rebalance, in data parallel plans: further numbers of streams besides parallel.streams. Each replica takes
    the fastest one that fits its memory."""

    def __post_init__(self) -> None:
        ranges.check("adapt", self)
        if self.rule is not Rule.none and self.upper is None:
            raise ConfigError(
                f"adapt.rule={self.rule} lets the global batch grow, so it needs a limit; give adapt.upper, in samples"
            )
        for key, rules in _USED_BY.items():
            value, default = getattr(self, key), type(self).__dataclass_fields__[key].default
            if str(self.rule) not in rules and value != default:
                raise ConfigError(
                    f"adapt.{key}={value} has no effect with adapt.rule={self.rule}; use adapt.rule="
                    f"{' or '.join(rules)}, or leave it out"
                )
        for key in ("micro_batch_sizes", "streams"):
            if getattr(self, key) and not self.rebalance:
                raise ConfigError(
                    f"adapt.{key}={getattr(self, key)} need adapt.rebalance=true, which chooses them by measured "
                    f"times; use it, or leave them out"
                )
        if not self.on and self.every != type(self).every:
            raise ConfigError(
                f"adapt.every={self.every} has no effect with adapt.rule=none and adapt.rebalance=false; set one of "
                f"these, or leave it out"
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
