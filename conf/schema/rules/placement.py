"""Whether a plan fits its model and its nodes: layers to stages, ranks to GPUs.

Every check raises `ConfigError` where its rule is broken.
"""

from __future__ import annotations

from collections.abc import Callable

from conf.errors import ConfigError
from conf.schema.cluster import Cluster
from conf.schema.executor import Executor
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.values import ranges
from conf.schema.values.partition import NodeOrder, Partition
from conf.visible import plural


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
            f"parallel.partition={partition} has {plural(stages, 'stage')}, but "
            f"parallel.pipeline={parallel.pipeline}; use parallel.pipeline={stages}, or a partition such as "
            f"{Partition.even(layers, parallel.pipeline)}"
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
    if parallel.world_size > ranges.MOST_RANKS:
        raise ConfigError(f"{parallel.sizes} = {parallel.world_size} ranks; a plan has at most {ranges.MOST_RANKS}")
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
