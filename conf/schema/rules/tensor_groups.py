"""The rules of tensor groups: what they share, and that each lies inside one node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from conf.errors import ConfigError
from conf.schema.cluster import Cluster
from conf.schema.model import Model
from conf.schema.parallel import Parallel
from conf.schema.values.partition import in_runs
from conf.schema.values.ranges import divides, nearest_divisors
from conf.visible import plural


def check(
    parallel: Parallel, model: Model, cluster: Cluster, groups: Sequence[str], ranks_per_node: Sequence[int]
) -> None:
    """Whether tensor groups share layers evenly, and each lies inside one of the nodes, which are of these `groups`.

    Raises:
        ConfigError: they do not.
    """
    if model.measured:
        return
    for tensor in dict.fromkeys(parallel.layout.tensors):
        divides("parallel.tensor", tensor, "model.heads", model.heads)
        if model.num_query_groups is not None:
            divides("parallel.tensor", tensor, "model.num_query_groups", model.num_query_groups)
        if model.ffn_hidden is not None:
            divides("parallel.tensor", tensor, "model.ffn_hidden", model.ffn_hidden)
        if parallel.sequence_parallel:
            divides("parallel.tensor", tensor, "model.sequence_length", model.sequence_length)
            if model.decoder_sequence_length is not None:
                divides("parallel.tensor", tensor, "model.decoder_sequence_length", model.decoder_sequence_length)
    if not parallel.alike:
        _check_groups_in_nodes(parallel, groups, ranks_per_node)
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


def _check_groups_in_nodes(parallel: Parallel, groups: Sequence[str], ranks_per_node: Sequence[int]) -> None:
    """Whether groups lie inside nodes where stages differ: ranks fill the nodes one after another, stage by stage."""
    layout = parallel.layout
    ends = list(accumulate(ranks_per_node))

    def over(stage: int, tensor: int) -> int | None:
        """The first rank of a group that lies over two nodes, were the stage's ranks in groups of this size."""
        first = layout.rank(stage, 0, 0)
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
        nearest = f"parallel.tensor={in_runs(fits, '-')}"
        nearest += f" parallel.replicas={in_runs([r // t for r, t in zip(ranks, fits, strict=True)], '-')}"
        node = bisect_right(ends, first)
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} puts a tensor group of stage {stage}, ranks {first} to "
            f"{first + tensor - 1}, over node {node} ({groups[node]}) and node {node + 1} ({groups[node + 1]}), but a "
            f"tensor-parallel group must fit in one node, and ranks fill the nodes of parallel.node_order stage by "
            f"stage; nearest that fits: {nearest}"
        )
