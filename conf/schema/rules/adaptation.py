"""Which plans and trainings can adapt their batch and their shares (`adapt`)."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.schema.adapt import Adapt, Rule
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, Rehearse
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from conf.schema.values.streams import MOST
from megatron_ext.contract.adaptive.config import ADAPTS
from megatron_ext.contract.adaptive.rules import BatchRange


def check(adapt: Adapt, parallel: Parallel, train: Train, engine: Engine, executor: Executor) -> None:
    """Whether the experiment of these parts can adapt as it is to.

    Raises:
        ConfigError: it cannot.
    """
    _check_plan(adapt, parallel, train)
    rule = adapt.rule
    if adapt.on and engine.kind is not EngineKind.tdpp:
        changes = "adapt.rebalance=true" if adapt.rebalance else f"adapt.rule={rule}"
        raise ConfigError(
            f"engine.kind={engine.kind} cannot be combined with {changes}; use "
            f"engine.kind={EngineKind.tdpp}, or "
            "leave adapt out"
        )
    rehearsed = executor.rehearse is not Rehearse.none and rule is not Rule.none
    if rehearsed and executor.noise is None:
        raise ConfigError(
            f"executor.rehearse={executor.rehearse} computes no gradients, whose noise adapt.rule={rule} needs; give "
            f"the noise scale in samples: executor.noise=2000, \"executor.noise='500,20000'\" at the "
            "beginning and at the end, or executor.noise=FILE.csv"
        )
    if executor.noise is not None and not rehearsed:
        raise ConfigError(
            f"executor.noise={executor.noise} applies only to a rehearsal with a batch that adapts; use "
            f"executor.rehearse=virtual and adapt.rule=noise, or leave it out"
        )


def _check_plan(adapt: Adapt, parallel: Parallel, train: Train) -> None:
    if not adapt.on:
        return
    wrong = f"adapt.rule={adapt.rule}" if adapt.rule is not Rule.none else "adapt.rebalance=true"
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.schedule_file={parallel.schedule_file} is for a fixed number of micro-batches, which {wrong} "
            f"changes; use parallel.schedule={ADAPTS[0]}, or leave adapt out"
        )
    if str(parallel.schedule) not in ADAPTS:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule} cannot be combined with {wrong}: it does not work with every "
            f"number of "
            f"micro-batches; use parallel.schedule={' or '.join(ADAPTS)}"
        )
    if not parallel.layout.even:
        most = max(parallel.layout.replicas)
        raise ConfigError(
            f"parallel.replicas={parallel.replicas} cannot be combined with {wrong}, which gives each replica its own "
            f"share; "
            f"use the same number of replicas on each stage: parallel.replicas=null parallel.data={most}"
        )
    if adapt.rebalance and parallel.data == 1 and not adapt.micro_batch_sizes and not adapt.streams:
        raise ConfigError(
            "adapt.rebalance=true has nothing to share with parallel.data=1; use adapt.rebalance=false, or give "
            "adapt.micro_batch_sizes or adapt.streams"
        )
    size = parallel.micro_batch_size
    for other in adapt.micro_batch_sizes:
        if other <= size or other % size:
            raise ConfigError(
                f"adapt.micro_batch_sizes={adapt.micro_batch_sizes}: {other} must be a larger multiple of "
                f"parallel.micro_batch_size={size}, so that micro-batches add up to every batch; use "
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
            f"compares the gradients of the halves of a batch, so it needs at least two micro-batches; use {smaller}"
        )
    try:
        BatchRange.between(lower, upper, parallel.micro_batch_size, parallel.data)
    except ValueError as error:
        raise ConfigError(f"adapt.upper={upper} is too small: {error}; use a larger one") from error
    if train.epochs is None and train.samples is None:
        raise ConfigError(
            f"train.iterations={train.iterations} cannot set the length of a training whose batch adapts "
            f"(adapt.rule={adapt.rule}); use train.samples or train.epochs instead"
        )
