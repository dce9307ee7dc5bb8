"""What goes with where and by which engine a run is executed, and what a sweep needs of its runs.

Megatron-LM's rules are those of core_v0.19.0. Every function raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conf.errors import ConfigError
from conf.schema.adapt import Adapt, Elastic
from conf.schema.cluster import Cluster
from conf.schema.engine import Engine
from conf.schema.executor import Executor, Rehearse
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.profile import Notify
from conf.schema.rules.plan_keys import Given, keys_of_plan, keys_that_change
from conf.schema.train import Train
from conf.visible import plural
from megatron_ext.contract.rules.engine import RULES as RULES_OF_ENGINES
from megatron_ext.contract.schedule.schedules import SCHEDULES


def check_rehearsal(executor: Executor) -> None:
    """A rehearsal runs on this machine alone."""
    if executor.rehearse != "none" and executor.kind != "local":
        raise ConfigError(
            f"executor.rehearse={executor.rehearse} rehearses the plan on this machine, but "
            f"executor.kind={executor.kind}; use executor=local, or executor.rehearse=none"
        )


def check_time(executor: Executor, cluster: Cluster, groups: Iterable[str]) -> None:
    """Whether the time limit of each node group leaves time to train before Slurm's warning, whose lead is fixed."""
    if executor.kind != "slurm":
        return
    for name in dict.fromkeys(groups):
        limit, save_s = cluster.groups[name].time_min, executor.save_s
        if limit is not None and limit * 60 <= save_s:
            raise ConfigError(
                f"cluster.groups.{name}.time_min={limit} minutes is not longer than executor.save_s={save_s} seconds, "
                f"so the run would save and end at once; give it at least {save_s // 60 + 1} minutes, or use a smaller "
                f"executor.save_s"
            )


def check_notify(notify: Notify, executor: Executor) -> None:
    """Whether somebody can be told in this way."""
    if notify.mail is not None and executor.kind != "slurm":
        raise ConfigError(
            f"notify.mail={notify.mail} needs Slurm, which sends the mail, but executor.kind={executor.kind}; use "
            "notify.command or notify.webhook"
        )


def check_jobs(max_jobs: int | None, executor: Executor) -> None:
    """Whether so many runs at a time can be kept to."""
    if max_jobs is None:
        return
    if executor.kind != "slurm" and not executor.wait:
        where = "this machine" if executor.kind == "local" else "the hosts"
        raise ConfigError(
            f"max_jobs={max_jobs} has no effect with executor.wait=false, which starts all runs on {where} "
            "at once; use executor.wait=true, which runs them one after another, or max_jobs=null"
        )


def check_metric(metric: str, dry_run: bool, train: Train) -> None:
    """Whether a run gives this metric; its name is looked up when the run is launched."""
    if dry_run:
        raise ConfigError(f"sweep_metric={metric} needs a run, and dry_run=true starts none; leave one of the two out")
    if metric.startswith("valid/") and train.eval_interval is None:
        raise ConfigError(f"sweep_metric={metric} needs evaluations; set train.eval_interval, in iterations")


def check_cost(unpriced: Sequence[str]) -> None:
    """Whether runs can be compared by their cost, where these of their node groups have no price."""
    if unpriced:
        raise ConfigError(
            f"sweep_metric=cost needs the price of every node, and cluster.groups.{unpriced[0]}.price_per_hour is not "
            f"set; give it, in dollars per node"
        )


MEGATRON_LM_SCHEDULES = [name for name, one in SCHEDULES.items() if one.megatron_lm]


def check_megatron_lm(engine: Engine, model: Model, parallel: Parallel, train: Train, rehearse: Rehearse) -> None:
    """Whether Megatron-LM can do what the rest of the configuration says."""
    if not model.traits.megatron_lm:
        raise ConfigError(
            f"model.family={model.family}: Megatron-LM trains only model.family=gpt here, with its pretrain_gpt.py; "
            f"use engine=tdpp"
        )
    _schedule(parallel, any(one.startswith("--microbatch-group-size") for one in engine.arguments))
    _without_equal(train, rehearse)
    if train.load is not None:
        raise ConfigError(
            f"train.load={train.load} reads checkpoints of tdpp's own engine; for those of Megatron-LM use "
            "engine.arguments=[--load,<folder>]"
        )
    if train.in_epochs:
        given = " ".join(f"train.{key}={getattr(train, key)}" for key in train.in_epochs)
        raise ConfigError(f"{given}: with engine.kind=megatron_lm, give intervals in iterations")


_PLAIN = ("chunks", "context", "expert", "global_batch_size", "micro_batch_size", "pipeline", "sequence_parallel")


def check_engine(
    engine: Engine,
    model: Model,
    parallel: Parallel,
    train: Train,
    adapt: Adapt,
    elastic: Elastic,
    overlaps_optimizer: bool,
    executor: Executor,
) -> None:
    """Whether the engine can run this plan. The rules are those of `megatron_ext.contract`."""
    given = {
        **keys_of_plan(parallel),
        **keys_that_change(adapt, elastic),
        "rehearsal": Given("executor.rehearse", executor.rehearse, None if executor.rehearse == "none" else True),
    }
    values = {
        "engine": str(engine.kind),
        "engine_options": engine.options,
        **{key: one.planned for key, one in given.items()},
        **{key: getattr(parallel, key) for key in _PLAIN},
        "tensor": parallel.tensor_size,
        "data": parallel.layout.replicas[0],
        "model": {**vars(model), "family": str(model.family)},
        "train": {**vars(train), "overlap_optimizer": overlaps_optimizer},
    }
    for keys, rule in RULES_OF_ENGINES:
        for key, value, must in rule(values) if all(one in values for one in keys) else ():
            own = key if key.startswith(("train.", "model.")) else f"parallel.{key}"
            raise ConfigError(f"{given.get(key, f'{own}={value}')} must be {must}")


_MEGATRON_LM = {
    "shares": "Megatron-LM's replicas take equal numbers of micro-batches; use parallel.shares=null",
    "reduce_dtype": "Megatron-LM has arguments of its own for that; use parallel.reduce_dtype=fp32 and "
    "engine.arguments=[--grad-reduce-in-bf16]",
    "compress": "Megatron-LM sends activations as they are; use parallel.compress=none",
    "scattered_cuts": "Megatron-LM sends whole messages since megatron-core 0.13; use parallel.scatter_messages=false",
    "recompute": "Megatron-LM computes as many layers again in all stages; use one for all stages",
    "zero": "Megatron-LM's replicas share the optimizer's state out, and nothing else; use parallel.zero=1",
    "shards": "Megatron-LM's replicas keep as much of the optimizer's state each; use parallel.shards=equal",
    "offload": "Megatron-LM has arguments of its own for that; use parallel.offload=none and "
    "engine.arguments=[--optimizer-cpu-offload]",
    "hierarchical_stages": "Megatron-LM leaves that to NCCL; use parallel.hierarchical_reduce=false",
    "schedule_file": "Megatron-LM cannot read a schedule; use parallel.schedule_file=null",
    "schedule": f"Megatron-LM has {' and '.join(MEGATRON_LM_SCHEDULES)} only; use one of them",
}
"""What Megatron-LM cannot do, and the way out, by key of plan.json."""


def _schedule(parallel: Parallel, regrouped: bool) -> None:
    """`regrouped`: interleaved stages take micro-batches in groups of another size than Megatron-LM's usual one."""
    if not parallel.alike:
        unlike = "replicas" if parallel.replicas is not None else "tensor"
        raise ConfigError(
            f"parallel.{unlike}={getattr(parallel, unlike)}: in Megatron-LM all stages have the same numbers of "
            f"replicas and the same tensor size; give single numbers for parallel.data and parallel.tensor, or use "
            f"engine=tdpp"
        )
    given = keys_of_plan(parallel)
    fits = {
        "recompute": len(parallel.recompute.stages) == 1,
        "zero": parallel.zero is None,  # of each stage its own, none above 1
        "schedule": parallel.schedule.definition.megatron_lm,
    }
    for key, reason in _MEGATRON_LM.items():
        if not fits.get(key, given[key].planned is None):
            raise ConfigError(f"{given[key]}: {reason}, or engine=tdpp")
    if parallel.chunks > 1 and parallel.micro_batches % parallel.pipeline and not regrouped:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule} with {plural(parallel.micro_batches, 'micro-batch', 'es')} "
            "(global_batch_size / (data * micro_batch_size)): Megatron-LM takes them in groups, and needs a multiple "
            f"of parallel.pipeline={parallel.pipeline}; change parallel.global_batch_size, or use engine=tdpp"
        )


def _without_equal(train: Train, rehearse: Rehearse) -> None:
    """What tdpp's own engine alone can do."""
    for given, key, value, off in (
        (train.overlap_optimizer is True, "train.overlap_optimizer", "true", "auto"),
        (train.compile, "train.compile", "true", "false"),
        (train.epochs is not None, "train.epochs", train.epochs, "null and train.iterations"),
        (train.samples is not None, "train.samples", train.samples, "null and train.iterations"),
        (train.eval_interval is not None, "train.eval_interval", train.eval_interval, "null"),
        (train.loss_scaler != "backoff", "train.loss_scaler", train.loss_scaler, "backoff"),
        (train.ema is not None, "train.ema", train.ema, "null"),
        (train.sync_every is not None, "train.sync_every", train.sync_every, "null"),
        (train.max_cost is not None, "train.max_cost", train.max_cost, "null"),
        (train.optimizer != "adamw", "train.optimizer", train.optimizer, "adamw"),
        (train.lr_policy != "cosine", "train.lr_policy", train.lr_policy, "cosine"),
        (rehearse != "none", "executor.rehearse", rehearse, "none"),
    ):
        if given:
            raise ConfigError(f"{key}={value} is for tdpp's own engine only; use {key}={off}, or engine=tdpp")
