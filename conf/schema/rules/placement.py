"""Whether a plan fits its model and its nodes: layers to stages, ranks to GPUs, tensor groups to nodes; and islands,
which train by themselves and meet every `train.sync_every` iterations.

Every check raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from conf.errors import ConfigError
from conf.schema.adapt import Adapt, Elastic
from conf.schema.cluster import Cluster
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor, Rehearse
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from conf.schema.values.partition import NodeOrder, Partition, run_length_text
from conf.schema.values.ranges import divides, nearest_divisors
from conf.visible import plural
from megatron_ext.contract.keys import shown
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import MOST_RANKS
from megatron_ext.contract.rules.layout import WHY_NOT
from megatron_ext.contract.schedule.streams import PIPEDREAM


def check_islands(
    parallel: Parallel, train: Train, adapt: Adapt, elastic: Elastic, engine: Engine, executor: Executor
) -> None:
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


def check_partition(partition: Partition, parallel: Parallel, model: Model) -> None:
    """Whether it has a part for each stage, and all blocks."""
    layers = model.counted
    stages, total = len(partition.layers), sum(partition.layers)
    if parallel.chunks > 1 and stages != parallel.virtual_stages:
        raise ConfigError(
            f"parallel.partition={partition} has {plural(stages, 'part')}, but parallel.pipeline * "
            f"parallel.chunks = {parallel.pipeline} * {parallel.chunks} = {parallel.virtual_stages}; use a partition "
            f"such as {Partition.even(layers, parallel.virtual_stages)}"
        )
    if stages != parallel.virtual_stages:
        raise ConfigError(
            f"parallel.partition={partition} has {plural(stages, 'stage')}, but parallel.pipeline={parallel.pipeline}; "
            f"use parallel.pipeline={stages}, or a partition such as {Partition.even(layers, parallel.pipeline)}"
        )
    if total != layers:
        raise ConfigError(
            f"parallel.partition={partition} has {' + '.join(map(str, partition.layers))} = {plural(total, 'layer')}, "
            f"but {model.blocks}; nearest that fits: {partition.fitted(layers)}"
        )


def check_nodes(order: NodeOrder, cluster: Cluster, executor: Executor) -> None:
    """Whether the cluster, or the hosts that were named, have the nodes of an order."""
    groups = cluster.groups
    for name in dict.fromkeys(order.groups):
        if name not in groups:
            raise ConfigError(
                f"parallel.node_order={order} names the node group {name!r}, but cluster {cluster.name!r} has only "
                f"{', '.join(groups)}"
            )
        used, count = order.groups.count(name), groups[name].count
        if used > count and not executor.reached:
            raise ConfigError(
                f"parallel.node_order={order} has {plural(used, 'node')} of group {name!r}, but "
                f"cluster.groups.{name}.count={count}; use at most {count}"
            )
    hosts = executor.reached
    if excluded := [host.name for host in hosts if host.name in cluster.exclude]:
        raise ConfigError(
            f"executor.hosts names {excluded[0]}, which cluster.exclude leaves out; take it out of one of them"
        )
    if hosts and len(hosts) != len(order.groups):
        raise ConfigError(
            f"executor.hosts={executor.hosts} has {plural(len(hosts), 'host')}, but "
            f"parallel.node_order={order} has {plural(len(order.groups), 'node')}; give one host per node, "
            f"or a node order with the group of each host, such as parallel.node_order={order.groups[0]}*{len(hosts)}"
        )


def check_ranks(
    parallel: Parallel,
    order: NodeOrder,
    cluster: Cluster,
    executor: Executor,
    ranks: tuple[int, ...],
    keeps_rules: Callable[..., bool],
) -> None:
    """Whether the ranks of a plan fill its nodes, which have so many.

    `keeps_rules` says whether other sizes break no other rule.
    """
    if parallel.world_size > MOST_RANKS:
        raise ConfigError(f"{parallel.sizes} = {parallel.world_size} ranks; a plan has at most {MOST_RANKS}")
    available = sum(ranks)
    if parallel.world_size == available:
        return
    ways = [f"parallel.{key}={value}" for key, value in _sizes_that_fill(parallel, available, keeps_rules)]
    if len(set(ranks)) == 1 and parallel.world_size % ranks[0] == 0:
        count = parallel.world_size // ranks[0]
        hosts = executor.reached
        ways.append(
            f"{plural(count, 'host')} (executor.hosts)"
            if hosts
            else f"{plural(count, 'node')} (cluster.groups.<group>.count)"
        )
    raise ConfigError(
        f"{parallel.sizes} = {plural(parallel.world_size, 'rank')}, but the chosen nodes of cluster "
        f"{cluster.name!r}, {order}, have {plural(available, 'GPU')}"
        + (f"; one of these fits: {'; '.join(ways)}" if ways else "; change these sizes or the node order")
    )


def _sizes_that_fill(parallel: Parallel, ranks: int, keeps_rules: Callable[..., bool]) -> list[tuple[str, int]]:
    """The changes of one parallel size that give so many ranks and break no other rule."""
    ways = []
    if parallel.by_stage:
        return []
    for key in ("tensor", "data", "pipeline"):
        value, rest = divmod(getattr(parallel, key) * ranks, parallel.world_size)
        if rest or not value:
            continue
        if keeps_rules(**{key: value}):
            ways.append((key, value))
    return ways


def check_tensor_groups(
    parallel: Parallel, model: Model, cluster: Cluster, groups: Sequence[str], ranks_per_node: Sequence[int]
) -> None:
    """Whether tensor groups share layers evenly, and each lies inside one of the nodes, which are of these `groups`.
    Raises ConfigError: they do not."""
    if model.measured and not model.traits.shares_layers:
        return
    for tensor in dict.fromkeys(parallel.layout.tensors):
        divides("parallel.tensor", tensor, "model.heads", model.heads)
        if parallel.sequence_parallel and tensor > 1 and model.measured:
            raise ConfigError(
                f"parallel.sequence_parallel=true cannot be combined with model.family={model.family} and "
                f"parallel.tensor={tensor}; use parallel.sequence_parallel=false"
            )
        if model.num_query_groups is not None:
            divides("parallel.tensor", tensor, "model.num_query_groups", model.num_query_groups)
        if model.ffn_hidden is not None:
            divides("parallel.tensor", tensor, "model.ffn_hidden", model.ffn_hidden)
        if parallel.sequence_parallel:
            divides("parallel.tensor", tensor, "model.sequence_length", model.sequence_length)
            if model.decoder_sequence_length is not None:
                divides("parallel.tensor", tensor, "model.decoder_sequence_length", model.decoder_sequence_length)
    if not parallel.alike:
        # ranks fill the nodes one after another, stage by stage
        for own in parallel.layout.parts or (parallel.layout,):
            _check_layout_in_nodes(parallel, own, groups, ranks_per_node)
        return
    for name, per_node in dict.fromkeys(zip(groups, ranks_per_node, strict=True)):
        if per_node % parallel.tensor_size:
            near = ", ".join(map(str, nearest_divisors(per_node, parallel.tensor_size)))
            by_group = cluster.groups[name].gpus_per_node == per_node
            node = (
                f"cluster.groups.{name}.gpus_per_node={per_node}"
                if by_group
                else f"a host of {plural(per_node, 'rank')}"
            )
            raise ConfigError(
                f"parallel.tensor={parallel.tensor} does not fit {node}: a tensor-parallel group must fit in one "
                f"node; nearest that fit: {near}"
            )


def _check_layout_in_nodes(
    parallel: Parallel, layout: Layout, groups: Sequence[str], ranks_per_node: Sequence[int]
) -> None:
    ends = list(accumulate(ranks_per_node))

    def over(stage: int, tensor: int) -> int | None:
        """The first rank of a group that lies over two nodes, were the stage's ranks in groups of this size."""
        first = layout.rank(stage, layout.start, 0)
        firsts = range(first, first + layout.tensors[stage] * layout.replicas[stage], tensor)
        return next((rank for rank in firsts if rank + tensor > ends[bisect_right(ends, rank)]), None)

    for stage, tensor in enumerate(layout.tensors):
        first = over(stage, tensor)
        if first is None:
            continue
        fits = [
            next(size for size in range(wanted, 0, -1) if wanted % size == 0 and over(number, size) is None)
            for number, wanted in enumerate(layout.tensors)
        ]
        ranks = [one * count for one, count in zip(layout.tensors, layout.replicas, strict=True)]
        nearest = f"parallel.tensor={run_length_text(fits, '-')}"
        nearest += f" parallel.replicas={run_length_text([r // t for r, t in zip(ranks, fits, strict=True)], '-')}"
        node = bisect_right(ends, first)
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} puts a tensor group of stage {stage}, ranks {first} to "
            f"{first + tensor - 1}, over node {node} ({groups[node]}) and node {node + 1} ({groups[node + 1]}), but a "
            f"tensor-parallel group must fit in one node, and ranks fill the nodes of parallel.node_order stage by "
            f"stage; nearest that fits: {nearest}"
        )


SCHEDULE = f"parallel.schedule={PIPEDREAM}"


def check_pipedream(partition: Partition, model: Model) -> None:
    """Whether such a model can be trained in this way, on stages that hold these layers. Raises ConfigError: it
    cannot."""
    layers = partition.layers
    held_by_ends = () if model.measured else (0, len(layers) - 1)
    for stage, count in enumerate(layers):
        if not count and stage not in held_by_ends:
            fewer = Partition(tuple(n for at, n in enumerate(layers) if n or at in held_by_ends))
            raise ConfigError(
                f"parallel.partition={partition} leaves stage {stage} without a layer to update, but {SCHEDULE} needs "
                f"one on each stage: use parallel.pipeline={len(fewer.layers)} parallel.partition={fewer}"
            )
    if len(layers) > 1 and "head.word" in model.traits.tied(model.sized(1)):
        raise ConfigError(
            f"model={model.name} shares the word embedding between the first and the last stage, and with {SCHEDULE} "
            f"the two update it at different times; use model.untie_embeddings_and_output_weights=true, or a schedule "
            f"with a flush, such as one_f_one_b"
        )
