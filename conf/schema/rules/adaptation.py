"""What goes with a batch that adapts (`adapt`), with nodes that change (`elastic`), and with several streams on a GPU.

Every check raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import ConfigError, reworded
from conf.schema.adapt import NOW, Adapt, By, Elastic, Rule
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, ExecutorKind, Het, Rehearse
from conf.schema.parallel import Parallel, check_data_parallel
from conf.schema.train import Train
from conf.schema.values.partition import MOST
from megatron_ext.contract.adaptive.config import BatchRange
from megatron_ext.contract.schedule.schedules import OF_ANY_COUNT


def check(adapt: Adapt, parallel: Parallel, train: Train, engine: Engine, executor: Executor) -> None:
    """Whether the experiment of these parts can adapt as it is to. Raises ConfigError: it cannot."""
    _check_plan(adapt, parallel, train)
    rule = adapt.rule
    if adapt.on and engine.kind is not EngineKind.tdpp:
        changes = "adapt.rebalance=true" if adapt.rebalance else f"adapt.rule={rule}"
        raise ConfigError(
            f"engine.kind={engine.kind} cannot be combined with {changes}; use engine.kind={EngineKind.tdpp}, or leave "
            "adapt out"
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
    wrong = _changes(adapt)
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.schedule_file={parallel.schedule_file} is for a fixed number of micro-batches, which {wrong} "
            f"changes; use parallel.schedule={OF_ANY_COUNT[0]}, or leave adapt out"
        )
    if str(parallel.schedule) not in OF_ANY_COUNT:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule} cannot be combined with {wrong}: it does not work with every "
            f"number of micro-batches; use parallel.schedule={' or '.join(OF_ANY_COUNT)}"
        )
    if not parallel.layout.even:
        most = max(parallel.layout.replicas)
        raise ConfigError(
            f"parallel.replicas={parallel.replicas} cannot be combined with {wrong}, which gives each replica its own "
            f"share; use the same number of replicas on each stage: parallel.replicas=null parallel.data={most}"
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


def _changes(adapt: Adapt) -> str:
    """The key by which a batch, or its shares, adapt."""
    return f"adapt.rule={adapt.rule}" if adapt.rule is not Rule.none else "adapt.rebalance=true"


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
    with reworded(ConfigError, f"adapt.upper={upper} is too small: ", "; use a larger one", of=ValueError):
        BatchRange.between(lower, upper, parallel.micro_batch_size, parallel.data)
    if train.epochs is None and train.samples is None:
        raise ConfigError(
            f"train.iterations={train.iterations} cannot set the length of a training whose batch adapts "
            f"(adapt.rule={adapt.rule}); use train.samples or train.epochs instead"
        )


def check_elastic(
    elastic: Elastic,
    parallel: Parallel,
    train: Train,
    adapt: Adapt,
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
    _check_elastic_plan(elastic, parallel, train, ranks)
    if elastic.enabled and not whole_replicas(parallel, ranks):
        _check_cut_anew(elastic, parallel, adapt, executor)
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
            f"elastic.by={elastic.by} cannot be combined with executor.kind=hosts, whose machines are named one by "
            "one; use executor=slurm or executor=local, or leave elastic.by out"
        )
    on_slurm = executor.kind is ExecutorKind.slurm
    if elastic.start == NOW and not on_slurm:
        raise ConfigError("elastic.start=now asks Slurm which nodes are free; use executor=slurm, or leave it out")
    if elastic.start == NOW and elastic.release:
        raise ConfigError(
            "elastic.start=now queues for the other nodes, and elastic.release=true gives them back; use one"
        )
    if elastic.enabled and on_slurm and executor.het is Het.hetjob and groups > 1:
        raise ConfigError(
            "executor.het=hetjob cannot be combined with elastic.enabled=true: Slurm ends a whole heterogeneous job "
            "when one part loses its nodes; use executor.het=jobs"
        )


def _check_elastic_plan(elastic: Elastic, parallel: Parallel, train: Train, ranks: Sequence[int]) -> None:
    memory, disk = train.save_memory, train.save_interval
    if not elastic.enabled:
        if memory is not None:
            raise ConfigError(
                f"train.save_memory={memory} keeps checkpoints in the memory of nodes for a run that continues without "
                "a lost one; set elastic.enabled=true, or leave it out"
            )
        return
    if isinstance(memory, int) and isinstance(disk, int) and memory >= disk:
        raise ConfigError(
            f"train.save_memory={memory} saves no more often than train.save_interval={disk}, which is on disk; use "
            "fewer iterations, or leave it out"
        )
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
    if parallel.schedule_file is not None:
        raise ConfigError(
            f"parallel.schedule_file={parallel.schedule_file} is for a fixed number of micro-batches, which changes "
            f"with {with_elastic}; leave it out"
        )


def whole_replicas(parallel: Parallel, ranks: Sequence[int]) -> bool:
    """Whether each of the nodes, which have so many ranks, has whole replicas of the model."""
    return parallel.pipeline == 1 and not any(count % parallel.tensor_size for count in ranks)


def _check_cut_anew(elastic: Elastic, parallel: Parallel, adapt: Adapt, executor: Executor) -> None:
    """Whether a run whose stages lie on several nodes can be cut anew for the nodes that are left."""
    across = "elastic.enabled=true with a replica's stages on several nodes"
    if adapt.on:
        raise ConfigError(
            f"{across} cannot be combined with {_changes(adapt)}; leave adapt out, or use parallel.pipeline=1"
        )
    if executor.kind is ExecutorKind.hosts:
        raise ConfigError(
            f"{across} cannot be combined with executor.kind=hosts, whose machines are named one by one; use "
            "executor=slurm or executor=local, or parallel.pipeline=1"
        )
    for key, value in (("elastic.by", elastic.by), ("elastic.start", elastic.start)):
        if value not in (None, NOW):
            raise ConfigError(
                f"{key}={value} chooses nodes with whole replicas, but parallel.pipeline={parallel.pipeline} "
                f"parallel.tensor={parallel.tensor} lays one on several nodes; leave {key} out, or use "
                "parallel.pipeline=1 and a tensor size that divides the GPUs of each node"
            )
    if not parallel.schedule.definition.flushes:
        raise ConfigError(
            f"{across} cannot be combined with parallel.schedule={parallel.schedule}, whose stages hold different "
            "versions of the weights; use a schedule that flushes, such as one_f_one_b"
        )
    if parallel.expert > 1:
        raise ConfigError(f"{across} cannot be combined with parallel.expert={parallel.expert}; use parallel.expert=1")


def check_gpu_streams(parallel: Parallel, adapt: Adapt, train: Train, engine: Engine) -> None:
    """Whether plan, training and engine go with several streams on a GPU, where the plan or its adaptation has them."""
    streams, none = f"parallel.streams={parallel.streams}", "parallel.streams=null"
    if max(parallel.streams_of) == 1:
        if not adapt.streams:
            return
        streams, none = f"adapt.streams={adapt.streams}", "adapt.streams=[]"
        check_data_parallel(parallel, streams, none)
    for key, value, allowed in (
        ("train.compile", str(train.compile).lower(), "false"),
        ("engine.kind", str(engine.kind), str(EngineKind.tdpp)),
    ):
        if value != allowed:
            raise ConfigError(f"{streams} cannot be combined with {key}={value}; use {key}={allowed}, or {none}")
