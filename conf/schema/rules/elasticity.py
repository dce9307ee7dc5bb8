"""Which plans can go on with other nodes than they were started on (`elastic`)."""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import ConfigError
from conf.schema.elastic import By, Elastic
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, ExecutorKind, Het, Rehearse
from conf.schema.parallel import Parallel
from conf.schema.train import Train


def check(
    elastic: Elastic,
    parallel: Parallel,
    train: Train,
    engine: Engine,
    executor: Executor,
    ranks: Sequence[int],
    groups: int,
    unpriced: Sequence[str],
) -> None:
    """Whether the run of these parts can go on with some of its nodes.

    Args:
        ranks: of each node.
        groups: the number of node groups that the nodes are of.
        unpriced: those of them without a price.

    Raises:
        ConfigError: it cannot.
    """
    _check_plan(elastic, parallel, train, ranks)
    for key, value, allowed in (
        ("engine.kind", str(engine.kind), str(EngineKind.tdpp)),
        ("executor.rehearse", str(executor.rehearse), str(Rehearse.none)),
    ):
        if elastic.enabled and value != allowed:
            raise ConfigError(f"{key}={value} cannot be combined with elastic.enabled=true; use {key}={allowed}")
    if elastic.by is By.dollars and unpriced:
        raise ConfigError(
            f"elastic.by=dollars chooses nodes by their price, but cluster.groups.{unpriced[0]}.price_per_hour is not "
            f"set; give it, in dollars per node, or use elastic.by=time"
        )
    if elastic.by is not None and executor.kind is ExecutorKind.hosts:
        raise ConfigError(
            f"elastic.by={elastic.by} cannot be combined with executor.kind=hosts, whose machines are "
            f"named one by "
            "one; use executor=slurm or executor=local, or leave elastic.by out"
        )
    on_slurm = executor.kind is ExecutorKind.slurm
    if elastic.enabled and on_slurm and executor.het is Het.hetjob and groups > 1:
        raise ConfigError(
            "executor.het=hetjob cannot be combined with elastic.enabled=true: Slurm ends a whole heterogeneous job "
            "when one "
            "part loses its nodes; use executor.het=jobs"
        )


def _check_plan(elastic: Elastic, parallel: Parallel, train: Train, ranks: Sequence[int]) -> None:
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
