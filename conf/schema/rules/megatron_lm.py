"""The rules of `engine=megatron_lm`: what a configuration may ask of Megatron-LM, as of core_v0.19.0.

Every function returns nothing and raises `ConfigError` when its rule is broken.
"""

from __future__ import annotations

from collections.abc import Iterable

from conf.errors import ConfigError
from conf.schema.cluster import Cluster
from conf.schema.executor import Rehearse
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.profile import Tracker
from conf.schema.train import Train
from conf.schema.values.schedules import ReduceDtype
from conf.visible import plural

SCHEDULES = ("one_f_one_b", "interleaved")


def can_run(
    model: Model, parallel: Parallel, train: Train, cluster: Cluster, groups: Iterable[str], rehearse: Rehearse
) -> None:
    """Whether Megatron-LM can do what the rest of the configuration says; `groups` are those of its nodes."""
    if not model.traits.megatron_lm:
        raise ConfigError(
            f"model.family={model.family}: Megatron-LM trains only model.family=gpt here, with its pretrain_gpt.py; "
            f"use engine=tdpp"
        )
    _schedule(parallel)
    _devices(cluster, groups)
    _without_equal(train, rehearse)
    if train.load is not None:
        raise ConfigError(
            f"train.load={train.load} reads checkpoints of tdpp's own engine; for those of Megatron-LM use "
            "engine.arguments=[--load,<folder>]"
        )
    if train.in_epochs:
        given = " ".join(f"train.{key}={getattr(train, key)}" for key in train.in_epochs)
        raise ConfigError(f"{given}: with engine.kind=megatron_lm, give intervals in iterations")
    if train.last_iteration % train.log_interval:
        raise ConfigError(
            f"train.iterations={train.iterations} must be a multiple of train.log_interval={train.log_interval}: "
            f"Megatron-LM logs only such iterations, and a run counts as complete only when its last one is logged"
        )


def check_log(log: list[Tracker]) -> None:
    """Whether a run can write these trackers, whose metrics are known from Megatron-LM's log alone."""
    if log:
        raise ConfigError(
            f"log={','.join(log)}: with engine.kind=megatron_lm, metrics are read from its log after the run; leave "
            f"it out, and run 'tdpp report RUN --{log[0]}' afterwards"
        )


def _schedule(parallel: Parallel) -> None:
    if not parallel.alike:
        unlike = "replicas" if parallel.replicas is not None else "tensor"
        raise ConfigError(
            f"parallel.{unlike}={getattr(parallel, unlike)}: in Megatron-LM all stages have the same numbers of "
            f"replicas and the same tensor size; give single numbers for parallel.data and parallel.tensor, or use "
            f"engine=tdpp"
        )
    if parallel.shares is not None:
        raise ConfigError(
            f"parallel.shares={parallel.shares}: Megatron-LM's replicas take equal numbers of micro-batches; use "
            "parallel.shares=null, or engine=tdpp"
        )
    if parallel.reduce_dtype is not ReduceDtype.fp32:
        raise ConfigError(
            f"parallel.reduce_dtype={parallel.reduce_dtype}: Megatron-LM has arguments of its own for that; use "
            "parallel.reduce_dtype=fp32 and engine.arguments=[--grad-reduce-in-bf16], or engine=tdpp"
        )
    if parallel.hierarchical_reduce:
        raise ConfigError(
            "parallel.hierarchical_reduce=true: Megatron-LM leaves that to NCCL; use "
            "parallel.hierarchical_reduce=false, or engine=tdpp"
        )
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.schedule_file={parallel.schedule_file}: Megatron-LM cannot read a schedule; use "
            "parallel.schedule_file=null, or engine=tdpp"
        )
    if parallel.schedule not in SCHEDULES:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule}: Megatron-LM has {' and '.join(SCHEDULES)} only; use one of them, "
            "or engine=tdpp"
        )
    if parallel.chunks > 1 and parallel.micro_batches < parallel.pipeline:
        raise ConfigError(
            f"parallel.schedule=interleaved with {plural(parallel.micro_batches, 'micro-batch', 'es')} "
            "(global_batch_size / (data * micro_batch_size)): Megatron-LM needs at least as many as "
            f"parallel.pipeline={parallel.pipeline}"
        )


def _devices(cluster: Cluster, groups: Iterable[str]) -> None:
    for name in dict.fromkeys(groups):
        gpu = cluster.groups[name].gpu
        if cluster.gpus[gpu].is_cpu:
            raise ConfigError(
                f"cluster.groups.{name}.gpu={gpu}: Megatron-LM trains on GPUs only; choose another cluster, or "
                "engine=tdpp"
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
        (train.max_cost is not None, "train.max_cost", train.max_cost, "null"),
        (train.optimizer != "adamw", "train.optimizer", train.optimizer, "adamw"),
        (train.lr_policy != "cosine", "train.lr_policy", train.lr_policy, "cosine"),
        (rehearse != "none", "executor.rehearse", rehearse, "none"),
    ):
        if given:
            raise ConfigError(f"{key}={value} is for tdpp's own engine only; use {key}={off}, or engine=tdpp")
