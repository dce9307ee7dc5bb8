"""From an experiment to its plan: which rank stands where, and what each needs to know (docs/formats.md)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

from conf.blocks_of_module import digest_of, known_blocks
from conf.errors import ConfigError
from conf.run_folder.rundir import SCHEDULE
from conf.schema.adapt import NOW, Rule
from conf.schema.cluster import Gpu
from conf.schema.experiment import Compress, EngineKind, Experiment, Offload, ReduceDtype, Rehearse, Shards
from conf.schema.model import Model
from conf.schema.rules.adaptation import whole_replicas
from launch.control import megatron_lm
from launch.control.executors.free_nodes import free_now
from launch.control.planning.predictions import elastic_of, rehearsal_times, started_on, times_in_streams, traffic_price
from launch.history.failures import mean_time_between_failures
from launch.node.elastic.replan import replanned
from megatron_ext.contract.layout import lcm
from megatron_ext.contract.parallel_config import SCATTERED, SCATTERS
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import (
    Corpus,
    IslandPlan,
    Node,
    NoisePoint,
    Place,
    RehearsalConfig,
    RunNode,
    Streaming,
    TimesInStreams,
    TimesOfSize,
)
from megatron_ext.contract.schedule.streams import Stream
from megatron_ext.contract.train_config import AUTO, TrainConfig


def make_plan(experiment: Experiment, run_name: str) -> Plan:
    """The plan of a run. A relative `data.prefix` or `train.load` is taken from the current folder.

    A rehearsal runs on one node whatever the cluster; its ranks say which node they stand for.

    Ranks lie in Megatron's order, tensor fastest, then data, then pipeline, and fill the nodes one after another; with
    islands, those of an island after those of the one before.
    """
    parallel, model, train = experiment.parallel, experiment.model, experiment.train
    layout = parallel.layout
    adapt = experiment.adapt.planned(parallel.global_batch_size, *_micro_batch_sizes(experiment))
    if train.in_epochs:
        given = " ".join(f"train.{key}={getattr(train, key)}" for key in train.in_epochs)
        raise ConfigError(f"{given}: only a launch counts the iterations of an epoch; give iterations here")
    nodes = _run_nodes(experiment)
    plan = Plan(
        run=run_name,
        tensor=parallel.tensor_size,
        data=max(layout.replicas),
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        partition=[] if parallel.own_plans else list(experiment.partition.layers),
        expert=parallel.expert if parallel.expert > 1 else None,
        context=parallel.context if parallel.context > 1 else None,
        engine_options=dict(experiment.engine.options) or None,
        script=None,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute,
        sharded_optimizer=parallel.sharded_optimizer,
        zero=largest if (largest := max(parallel.zeros)) >= SCATTERED else None,
        zeros=list(parallel.zeros) if len({*parallel.zeros}) > 1 else None,
        shards=_shards(experiment),
        offload=None if parallel.offload is Offload.none else Offload.together(parallel.offloads),
        offloads=list(parallel.offloads) if len({*parallel.offloads}) > 1 else None,
        reduce_dtype=None if parallel.reduce_dtype is ReduceDtype.fp32 else parallel.reduce_dtype,
        compress=None if parallel.compress is Compress.none else parallel.compress,
        scattered_cuts=_scattered_cuts(experiment),
        hierarchical_stages=_hierarchical_stages(experiment),
        schedule=parallel.schedule,
        schedule_file=parallel.schedule_file and SCHEDULE,
        micro_batch_size=parallel.micro_batch_size,
        global_batch_size=parallel.global_batch_size,
        shares=list(parallel.micro_batches_of) if parallel.shares and len(set(parallel.micro_batches_of)) > 1 else None,
        streams=list(parallel.streams_of) if max(parallel.streams_of) > 1 else None,
        islands=None if train.sync_every is None else list(parallel.islands_of),
        island_plans=[
            IslandPlan(own.pipeline, list(own.layout.tensors), list(partition.layers))
            for own, partition in experiment.by_island
        ]
        if parallel.own_plans
        else None,
        tensors=list(layout.tensors) if len(set(layout.tensors)) > 1 else None,
        replicas=None if layout.even else list(layout.replicas),
        streaming=_streaming(parallel.stream),
        adapt=adapt,
        elastic=elastic_of(experiment, adapt) if experiment.elastic.enabled else None,
        master_port=experiment.executor.master_port,
        meeting_timeout_s=math.ceil(experiment.executor.meet_min * 60),
        nodes=nodes,
        ranks=sorted(
            (
                Place(rank, node, local_rank, *layout.stage_dp_tp(rank))
                for node, ranks in enumerate(node.ranks for node in nodes)
                for local_rank, rank in enumerate(ranks)
            ),
            key=lambda place: place.rank,
        ),
        model=replace(model.sized(lcm(layout.tensors)), code_digest=code_digest(model)),
        blocks=known_blocks(experiment),
        train=_train_config(experiment),
        data_prefix=os.path.abspath(experiment.data.prefix),  # noqa: PTH100  (resolves '..', follows no link)
        data_blend=[
            Corpus(prefix=os.path.abspath(corpus.prefix), weight=corpus.weight)  # noqa: PTH100
            for corpus in experiment.data.corpora()
            if experiment.data.blend
        ],
        data_split=[float(weight) for weight in experiment.data.split.split(",")],
        data_cache=experiment.data.cache and os.path.abspath(experiment.data.cache),  # noqa: PTH100
        data_masking=experiment.data.masking(str(model.family)),
        data_documents=experiment.data.documents() if model.traits.running_text else None,
        data_augment=experiment.data.augmented(str(model.family)),
        data_bucketing=experiment.data.bucketing,
        timeline=experiment.profile.timeline,
        nsys=experiment.profile.nsys or experiment.profile.ncu,
        trace_iteration=experiment.profile.trace_iteration,
        device="cpu" if all(_gpu(experiment, node.group).is_cpu for node in nodes) else "cuda",
        rehearsal=None,
        folder=Path(experiment.runs_dir).absolute() / run_name,
        engine=str(experiment.engine.kind),
    )
    if experiment.engine.kind is EngineKind.megatron_lm:
        plan = replace(plan, script=megatron_lm.script(experiment, plan.files.checkpoints))
    if plan.elastic is not None and not whole_replicas(parallel, experiment.ranks_per_node()):
        from launch.control.planning.node_set_plans import node_set_plans  # which searches

        plan = replace(plan, elastic=replace(plan.elastic, plans=node_set_plans(experiment, make_plan)))
    if experiment.elastic.start is not None:
        plan = replanned(plan, first_nodes(experiment))
    return plan if experiment.executor.rehearse is Rehearse.none else _rehearsed(plan, experiment)


def first_nodes(experiment: Experiment) -> Sequence[int]:
    """The nodes that an elastic run starts on, by node rank. Raises TdppError: `elastic.start` names none that it could
    start on."""
    counts, elastic = experiment.ranks_per_node(), experiment.elastic
    if elastic.start == NOW:
        return free_now(experiment)
    return range(len(counts)) if elastic.start is None else started_on(elastic.start, counts, elastic.min_nodes)


def _run_nodes(experiment: Experiment) -> list[RunNode]:
    """The nodes in their order, which the ranks fill one after another."""
    counts = experiment.ranks_per_node()
    groups = experiment.node_order.groups
    environments = _environments(experiment)
    ranks = _by_island(experiment)
    return [
        RunNode(
            name=name,
            group=group,
            gpu=_gpu(experiment, group).name,
            ranks=list(ranks[first : first + count]),
            environment=environment,
        )
        for name, group, environment, first, count in zip(
            node_names(experiment), groups, environments, accumulate(counts, initial=0), counts, strict=False
        )
    ]


def _by_island(experiment: Experiment) -> Sequence[int]:
    """The ranks in the order in which they fill nodes: an island's pipelines lie together, where all tensor groups are
    of one size, so that none of these is torn apart."""
    parallel, layout = experiment.parallel, experiment.parallel.layout
    if experiment.train.sync_every is None or not parallel.alike:
        return range(layout.world_size)
    island_of = [island for island, size in enumerate(parallel.islands_of) for _ in range(size)]
    return sorted(range(layout.world_size), key=lambda rank: island_of[layout.stage_dp_tp(rank)[1]])


def _train_config(experiment: Experiment) -> TrainConfig:
    """The training, with what other parts of the configuration say of it."""
    train = experiment.train
    return TrainConfig(
        **asdict(train)
        | {
            "overlap_optimizer": experiment.overlaps_optimizer,
            "lr_decay_iterations": _decay(experiment),
            "price_per_hour": experiment.price_per_hour(),
            "traffic_price": None if train.max_cost is None else traffic_price(experiment),
            **_saving(experiment),
            "load": train.load and os.path.abspath(train.load),  # noqa: PTH100
        }
    )


NEVER_S = 1e12
"""A run's plan has this where no node ever fails, which is its rule's limit."""


def _saving(experiment: Experiment) -> dict[str, object]:
    """What the plan has for `save_interval=auto` and `save_memory=auto`."""
    train = experiment.train
    found: dict[str, object] = {}
    if train.auto_interval:
        found["save_interval"] = None
    if str(train.save_memory) == AUTO:
        found["save_memory"] = 0
    if not found:
        return {}
    saves = train.checkpoint and experiment.executor.rehearse is Rehearse.none
    if saves and experiment.engine.kind is not EngineKind.megatron_lm:
        nodes, groups = _run_nodes(experiment), experiment.cluster.groups
        rates = [groups[node.group].failures_per_day for node in nodes]
        gpus = [node.gpu for node, rate in zip(nodes, rates, strict=True) if rate is None]
        mtbf_s = mean_time_between_failures(gpus, Path(experiment.runs_dir), sum(filter(None, rates)))
        found["mtbf_s"] = float(f"{min(mtbf_s, NEVER_S):.3g}")
    return found


def _decay(experiment: Experiment) -> int:
    """The length of the learning rate's policy: in iterations, or of a batch that adapts in those of the first one."""
    train = experiment.train
    if train.lr_decay_iterations is not None:
        return train.lr_decay_iterations
    if experiment.adapt.rule is Rule.none:
        return train.last_iteration
    assert train.samples is not None, "checked by conf.schema.rules.adaptation"
    return max(1, train.samples // experiment.parallel.global_batch_size)


def _micro_batch_sizes(experiment: Experiment) -> tuple[list[list[int]] | None, list[list[list[int]]] | None]:
    """Returns the sizes that each replica may have, and with each the numbers of streams: its own, and others that fit
    into memory. None: its own alone."""
    sizes, streams = experiment.adapt.micro_batch_sizes, experiment.adapt.streams
    if not sizes and not streams:
        return None, None
    from fasop.search.shares.micro_batch_memory import that_fit  # numpy is slow to import

    if experiment.elastic.enabled:  # whichever nodes are left, a GPU then holds more of a sharded optimizer
        experiment = replace(experiment, parallel=replace(experiment.parallel, sharded_optimizer=False))
    found = that_fit(experiment, sorted({*sizes}), sorted({*streams}))
    return [[*one] for one in found] if sizes else None, [[*one.values()] for one in found] if streams else None


def _hierarchical_stages(experiment: Experiment) -> list[int] | None:
    """Returns the stages whose replicas sum gradients within nodes first; None if there are none."""
    if not experiment.parallel.hierarchical_reduce:
        return None
    from fasop.simulation.nodes import stages_summing_by_node  # numpy is slow to import
    from fasop.simulation.predict import planned

    return stages_summing_by_node(planned(experiment)) or None


def _scattered_cuts(experiment: Experiment) -> list[int] | None:
    """Returns the stages that send parts of messages alone; None if there are none."""
    if experiment.parallel.scatter_messages == SCATTERS[0]:
        return None
    from fasop.simulation.predict import planned  # numpy is slow to import
    from fasop.simulation.ranks.heterogeneous_stages import cuts_scattered

    return cuts_scattered(planned(experiment)) or None


def _shards(experiment: Experiment) -> list[list[int]] | None:
    """Returns in which proportion replicas keep what they share out; None where all keep as much."""
    if experiment.parallel.shards is Shards.equal:
        return None
    from fasop.simulation.memory_of_stages import shards_of  # numpy is slow to import
    from fasop.simulation.predict import planned

    return shards_of(planned(experiment))


def _streaming(stream: Stream | None) -> Streaming | None:
    """What plan.json says of a stream, whose replicas it has for themselves."""
    if stream is None:
        return None
    return Streaming(stream.semantics, stream.update_every, None if stream.depth is None else list(stream.depth))


def _rehearsed(plan: Plan, experiment: Experiment) -> Plan:
    """The same plan, all on this machine, with the times that everything takes."""
    adapt = plan.adapt
    here = RunNode("rehearsal-0", "rehearsal", "CPU", [place.rank for place in plan.ranks], environment={})
    return replace(
        plan,
        nodes=[here],
        ranks=[
            replace(place, node=0, local_rank=place.rank, emulates=plan.nodes[place.node].name) for place in plan.ranks
        ],
        device="cpu",
        rehearsal=RehearsalConfig(
            clock=str(experiment.executor.rehearse),
            nodes=[Node(node.name, node.group, node.gpu, node.ranks) for node in plan.nodes],
            ranks=rehearsal_times(experiment),
            other_sizes=None if adapt is None else _times_of_sizes(experiment, adapt.micro_batch_sizes),
            noise=_noise(experiment),
            in_streams=_times_in_streams(plan, experiment),
        ),
    )


def _times_of_sizes(experiment: Experiment, sizes: Sequence[Sequence[int]] | None) -> list[TimesOfSize] | None:
    """Returns the times of the sizes that replicas may have beside the plan's own."""
    if sizes is None:
        return None
    others = sorted({size for of_replica in sizes for size in of_replica} - {experiment.parallel.micro_batch_size})
    return [TimesOfSize(size, rehearsal_times(experiment, size)) for size in others]


def _times_in_streams(plan: Plan, experiment: Experiment) -> list[TimesInStreams] | None:
    """Returns the times of every size of micro-batches, where replicas may have several streams."""
    adapt, size = plan.adapt, plan.micro_batch_size
    of_replicas = [] if adapt is None else adapt.streams or []
    counts = [*(plan.streams or ()), *(one for of_sizes in of_replicas for of_size in of_sizes for one in of_size)]
    if max(counts, default=1) == 1:
        return None
    sizes = {size} if adapt is None else {size, *(one for own in adapt.micro_batch_sizes or () for one in own)}
    return [times_in_streams(experiment, one, max(counts)) for one in sorted(sizes)]


def _noise(experiment: Experiment) -> list[NoisePoint] | None:
    """What a rehearsal measures."""
    text, samples = experiment.executor.noise, experiment.train.samples
    if text is None:
        return None
    from fasop.trainings.noise import NUMBERS, of_numbers, read_csv  # numpy is slow to import

    assert samples is not None, "checked by conf.schema.rules.adaptation"
    found = of_numbers(text, samples) if NUMBERS.fullmatch(text) else read_csv(Path(text))
    return [NoisePoint(*point) for point in zip(found.samples, found.scales, strict=True)]


def code_digest(model: Model) -> str | None:
    """Returns the digest of the file of `code` or `config`, by which a run that goes on notices that it has changed.
    Raises ConfigError: it cannot be read."""
    return None if model.code is None and model.config is None else digest_of(model)


def _environments(experiment: Experiment) -> list[dict[str, str]]:
    """Returns the environment of each node's ranks, over what the run gives to all."""
    found = [dict(experiment.cluster.groups[group].environment) for group in experiment.node_order.groups]
    for environment, host in zip(found, experiment.executor.reached, strict=False):
        if host.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.gpus))
    return found


def node_names(experiment: Experiment) -> list[str]:
    """Names the nodes by rank: a host's name for ssh, or `<group>-<index>`, where the index counts a group's nodes."""
    if hosts := experiment.executor.reached:
        return [host.name for host in hosts]
    seen: dict[str, int] = {}
    names = []
    for group in experiment.node_order.groups:
        index = seen.get(group, 0)
        seen[group] = index + 1
        names.append(f"{group}-{index}")
    return names


def _gpu(experiment: Experiment, group: str) -> Gpu:
    cluster = experiment.cluster
    return cluster.gpus[cluster.groups[group].gpu]
