"""`train.overlap_optimizer`: whether weights are updated bucket by bucket, while later gradients are still summed."""

from __future__ import annotations

from collections.abc import Iterator

from conf.errors import ConfigError
from conf.schema.adapt import Adapt
from conf.schema.engine import Engine, EngineKind
from conf.schema.parallel import AUTO, Parallel
from conf.schema.train import Optimizer, Precision, Train


def overlaps(parallel: Parallel, train: Train, engine: Engine, adapt: Adapt) -> bool:
    """Whether a run does so: where it was asked for or, with `auto`, wherever it changes no result and can gain."""
    if train.overlap_optimizer == AUTO:
        return next(_reasons(parallel, train, engine, adapt), None) is None
    return bool(train.overlap_optimizer)


def check(parallel: Parallel, train: Train, engine: Engine, adapt: Adapt) -> None:
    """Raises ConfigError where it was asked for and cannot be."""
    if train.overlap_optimizer is not True:
        return
    for given, why, instead in _reasons(parallel, train, engine, adapt):
        raise ConfigError(
            f"train.overlap_optimizer=true cannot be combined with {given}: {why}; use {instead}, or "
            "train.overlap_optimizer=auto"
        )


def _reasons(parallel: Parallel, train: Train, engine: Engine, adapt: Adapt) -> Iterator[tuple[str, str, str]]:
    """Why not: the key and its value, the rule, and the way out."""
    if engine.kind is not EngineKind.tdpp:
        yield f"engine.kind={engine.kind}", "only tdpp's own engine can do it", "engine=tdpp"
    for key, value in (("tensor", parallel.tensor_size), ("pipeline", parallel.pipeline)):
        if value != 1:
            yield f"parallel.{key}={value}", "it works only in data parallel plans", f"parallel.{key}=1"
    if parallel.layout.replicas[0] == 1:
        yield "parallel.data=1", "a single replica has no gradients to sum", "parallel.data=2 or more"
    if parallel.stream is not None:
        yield "parallel.schedule=pipedream", "its stages update independently", "parallel.schedule=one_f_one_b"
    for given, there, instead in (
        (f"parallel.streams={parallel.streams}", max(parallel.streams_of) > 1, "parallel.streams=null"),
        (f"adapt.streams={adapt.streams}", bool(adapt.streams), "adapt.streams=[]"),
    ):
        if there:
            yield given, "the gradients of all streams must be added up first", instead
    if parallel.sharded_optimizer:
        yield (
            "parallel.sharded_optimizer=true",
            "replicas hand each other their new weights when all gradients are clipped and applied",
            "parallel.sharded_optimizer=false",
        )
    if train.clip_grad:
        yield (
            f"train.clip_grad={train.clip_grad:g}",
            "clipping needs the norm of all gradients before any weight is updated",
            "train.clip_grad=0",
        )
    if train.optimizer is Optimizer.lamb:
        yield "train.optimizer=lamb", "its updates need the norms of whole weight matrices", "another optimizer"
    if train.precision is Precision.fp16:
        yield (
            "train.precision=fp16",
            "only all gradients together decide whether an iteration is skipped",
            "train.precision=bf16",
        )
