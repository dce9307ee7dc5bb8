"""Runs that go on with other nodes than they were started on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.parallel import Parallel
from conf.schema.train import Train


class By(StrEnum):
    """What is to be least of the next epoch (megatron_ext/contract/adaptive/forecast.py)."""

    time = "time"
    dollars = "dollars"


@config
class Elastic:
    enabled: bool = False
    """Continue from the latest checkpoint without a lost node, or with a node that lost a rank; no new launch is needed
    (docs/elastic.md)."""
    min_nodes: int = 1
    """The run ends if fewer nodes are left."""
    start: str | None = None
    """The nodes to start on, as a JSON file of JABAS's scheduler: {"0": 4, "1": 4} are the GPUs of nodes 0 and 1 of the
    plan. null: all nodes."""
    by: By | None = None
    """At the end of each epoch, continue on the nodes with the least predicted time or cost for the next one. null:
    only a lost node changes the nodes."""
    epoch: int | None = None
    """Samples of an epoch; null: those that train.epochs counts."""
    restart_s: float = 60.0
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


def check(elastic: Elastic, parallel: Parallel, train: Train, ranks: Sequence[int]) -> None:
    """Whether a plan with so many ranks on each node can go on with some of its nodes.

    Raises:
        ConfigError: it cannot.
    """
    if not elastic.enabled:
        return
    with_elastic = "elastic.enabled=true"
    if len(ranks) < 2:
        raise ConfigError(
            f"{with_elastic}: the run has one node, so no other could continue; give it more "
            "(cluster.groups.<group>.count, parallel.node_order), or leave elastic out"
        )
    if elastic.min_nodes > len(ranks):
        raise ConfigError(f"elastic.min_nodes={elastic.min_nodes} must be at most {len(ranks)}, the nodes of the run")
    if not train.checkpoint:
        raise ConfigError(
            f"train.checkpoint=false leaves no checkpoint to continue from with {with_elastic}; use "
            f"train.checkpoint=true"
        )
    if train.save_interval is None:
        raise ConfigError(
            f"train.save_interval=null saves only at the end, so a run with {with_elastic} would start over when a "
            f"node is lost; set it, in iterations"
        )
    if elastic.by is not None and elastic.epoch is None and train.epochs is None:
        raise ConfigError(
            f"elastic.by={elastic.by} chooses nodes at the end of each epoch; give elastic.epoch, the samples of an "
            f"epoch, or train.epochs as the length of the training"
        )
    if parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline} cannot be combined with {with_elastic}, which gives each node "
            f"whole "
            "replicas of the model; use parallel.pipeline=1 and more replicas (parallel.data)"
        )
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.schedule_file={parallel.schedule_file} is for a fixed number of micro-batches, which changes "
            f"with {with_elastic}; leave it out"
        )
    size = parallel.tensor_size
    if any(count % size for count in ranks):
        raise ConfigError(
            f"parallel.tensor={size} cannot be combined with {with_elastic}: a tensor group would span two of the "
            f"nodes, "
            f"which have {'-'.join(map(str, ranks))} GPUs; use a tensor size that divides each of these"
        )
