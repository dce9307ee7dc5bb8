"""Runs that change on the way: a batch that adapts, shares that follow measured times, nodes that come and go."""

from __future__ import annotations

from dataclasses import fields

from conf.errors import ConfigError
from conf.schema.values import ranges
from conf.schema.values.ranges import config
from megatron_ext.contract.adaptive import config as contract
from megatron_ext.contract.adaptive.config import AdaptConfig, LrScaling, Rule
from megatron_ext.contract.adaptive.forecast import By
from megatron_ext.contract.keys import COUNT, Range, from_0, option, shown

__all__ = ["Adapt", "By", "LrScaling", "Rule"]

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
"""The rules that look at each key."""


@config
class Adapt(contract.Adapt):
    micro_batch_sizes: list[int] = option(list, Range(1, 2**20))
    """With rebalance, further micro-batch sizes, all multiples of parallel.micro_batch_size. Each replica takes the
    fastest one that fits its memory, by a profile or a prediction."""
    streams: list[int] = option(list, Range(1, 64))
    """With rebalance, in data parallel plans: further numbers of streams besides parallel.streams. Each replica takes
    the fastest one that fits its memory."""

    def __post_init__(self) -> None:
        ranges.check("adapt", self)
        if self.rule is not Rule.none and self.upper is None:
            raise ConfigError(
                f"adapt.rule={self.rule} lets the global batch grow, so it needs a limit; give adapt.upper, in samples"
            )
        for key, rules in _USED_BY.items():
            value = getattr(self, key)
            if self.rule not in rules and value != getattr(type(self), key):
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
        own = {field.name: getattr(self, field.name) for field in fields(contract.Adapt)}
        smoothing = (1 if self.rule is Rule.similarity else SMOOTHING) if self.smoothing is None else self.smoothing
        found = {"lower": lower, "upper": upper, "smoothing": smoothing}
        return AdaptConfig(**{**own, **found}, micro_batch_sizes=micro_batch_sizes, streams=streams)


NOW = "now"
"""The value of `elastic.start` that stands for the nodes that are free when the run is launched."""


@config
class Elastic:
    enabled: bool = False
    """Continue from the latest checkpoint without a lost node, or with a node that lost a rank; no new launch is needed
    (docs/elastic.md)."""
    min_nodes: int = option(1, COUNT)
    """The run ends if fewer nodes are left."""
    start: str | None = None
    """The nodes to start on, as a JSON file of JABAS's scheduler: {"0": 4, "1": 4} are the GPUs of nodes 0 and 1 of the
    plan; now: those that Slurm would start at once, and the others join when they are free. null: all nodes."""
    by: By | None = None
    """At the end of each epoch, continue on the nodes with the least predicted time or cost for the next one. null:
    only a lost node changes the nodes."""
    epoch: int | None = option(None, Range(1, 10**15))
    """Samples of an epoch; null: those that train.epochs counts."""
    restart_s: float = option(60.0, from_0())
    """Seconds that a change of nodes is expected to take."""
    release: bool = False
    """End the nodes that are not chosen, so that Slurm can give them to others; false: they wait for the next
    choice."""

    def __post_init__(self) -> None:
        ranges.check("elastic", self)
        for key, needed, there in (
            ("min_nodes", "enabled=true", self.enabled),
            ("start", "enabled=true", self.enabled),
            ("by", "enabled=true", self.enabled),
            ("epoch", "by=time", self.by is not None),
            ("restart_s", "by=time", self.by is not None),
            ("release", "by=time", self.by is not None),
        ):
            value = getattr(self, key)
            if not there and value != getattr(type(self), key):
                raise ConfigError(
                    f"elastic.{key}={shown(value)} has no effect without elastic.{needed}; use elastic.{needed}, or "
                    "leave it out"
                )
