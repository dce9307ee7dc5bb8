"""What goes with islands, which train by themselves and meet every `train.sync_every` iterations."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.adapt import Adapt, Elastic
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, Rehearse
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from megatron_ext.contract.keys import shown
from megatron_ext.contract.rules.layout import WHY_NOT


def check(parallel: Parallel, train: Train, adapt: Adapt, elastic: Elastic, engine: Engine, executor: Executor) -> None:
    """Raises ConfigError where there are islands and something does not go with them, or lacks them."""
    every = train.sync_every
    if every is None:
        if parallel.islands is not None:
            raise ConfigError(
                f"parallel.islands={parallel.islands} is for islands that train by themselves; set train.sync_every, "
                "such as 50, or leave it out"
            )
        if parallel.own_plans:
            raise ConfigError(
                f"parallel.tensor={parallel.tensor} parallel.partition={parallel.partition} are written by island; set "
                "train.sync_every, such as 50, or give one of each"
            )
        return
    with_islands = f"train.sync_every={every}"
    if engine.kind is not EngineKind.tdpp:
        raise ConfigError(
            f"engine.kind={engine.kind} cannot be combined with {with_islands}: only tdpp's own engine has islands; "
            "use engine=tdpp"
        )
    streams = parallel.stream is not None
    for rule, key, value, allowed in (
        ("streaming", "parallel.schedule", "pipedream" if streams else "one_f_one_b", "one_f_one_b"),
        ("replicas", "parallel.replicas", parallel.replicas, parallel.replicas if parallel.layout.even else None),
        ("sharded_optimizer", "parallel.zero", parallel.zero, None),
        ("sharded_optimizer", "parallel.sharded_optimizer", parallel.sharded_optimizer, False),
        ("hierarchical_stages", "parallel.hierarchical_reduce", parallel.hierarchical_reduce, False),
        ("adapt", "adapt.rule", str(adapt.rule), "none"),
        ("adapt", "adapt.rebalance", adapt.rebalance, False),
        ("elastic", "elastic.enabled", elastic.enabled, False),
        ("rehearsal", "executor.rehearse", str(executor.rehearse), str(Rehearse.none)),
    ):
        if value != allowed:
            same, off = (" (zero=1)", " (zero=0)") if value is True and rule == "sharded_optimizer" else ("", "")
            raise ConfigError(
                f"{key}={shown(value)}{same} cannot be combined with {with_islands}: {WHY_NOT[rule]}; use "
                f"{key}={shown(allowed)}{off}, or train.sync_every=null"
            )
    replicas = parallel.layout.replicas[0]
    if replicas < 2:
        raise ConfigError(
            f"{with_islands} needs at least two islands, but parallel.data={replicas}; use parallel.data=2 or more, or "
            "train.sync_every=null"
        )
