"""Runs that go on with other nodes than they were started on."""

from __future__ import annotations

from enum import StrEnum

from conf.errors import ConfigError
from conf.schema.config_class import config
from conf.schema.values import ranges
from megatron_ext.contract.keys import COUNT, Range, from_0, option


class By(StrEnum):
    """What is to be least of the next epoch (megatron_ext/contract/adaptive/forecast.py)."""

    time = "time"
    dollars = "dollars"


@config
class Elastic:
    enabled: bool = False
    """Continue from the latest checkpoint without a lost node, or with a node that lost a rank; no new launch is needed
    (docs/elastic.md)."""
    min_nodes: int = option(1, COUNT)
    """The run ends if fewer nodes are left."""
    start: str | None = None
    """The nodes to start on, as a JSON file of JABAS's scheduler: {"0": 4, "1": 4} are the GPUs of nodes 0 and 1 of the
    plan. null: all nodes."""
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
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ConfigError(
                    f"elastic.{key}={shown} has no effect without elastic.{needed}; use elastic.{needed}, or leave it "
                    "out"
                )
