"""No time for one kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from conf.run_folder.rank_ranges import rank_ranges
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change
from reports.path.graph import Graph, Kind, median_by_rank

FREED = (
    (Kind.DATA, Cause.DATA, "no time spent loading data", "Loading data"),
    (
        Kind.TENSOR,
        Cause.TENSOR,
        "no time spent on the tensor groups' communication",
        "The communication of tensor groups",
    ),
    (Kind.EMBEDDING, Cause.EMBEDDING, "no time spent on the embedding's all-reduce", "The embedding's all-reduce"),
    (Kind.GRADIENTS, Cause.GRADIENTS, "no time spent on the gradients' all-reduce", "The gradients' all-reduce"),
    (Kind.WEIGHTS, Cause.WEIGHTS, "no time spent on the weights' all-gather", "The weights' all-gather"),
    (Kind.OPTIMIZER, Cause.OPTIMIZER, "no time spent on the optimizer", "The optimizer"),
    (Kind.HOST, Cause.HOST, "no time between the recorded events", "Time between the recorded events"),
)
FEW = 0.5
"""Of the ranks that do a thing: if no more take most of its time, they are named."""
MUCH_LESS = 0.5
"""Of the longest time: what the others take at most."""


def freed(graphs: Sequence[Graph], plan: Plan) -> Iterator[Change]:
    """Each kind of work that takes any time."""
    for kind, cause, change, what in FREED:
        lasts = median_by_rank([_stood(graph, kind) for graph in graphs])
        if lasts and max(lasts.values()):
            yield Change(
                cause=cause,
                change=change,
                because=f"{what} takes {max(lasts.values()) / 1e6:,.1f} ms per iteration{_where(lasts, plan)}.",
                lasts_ns=[np.where(graph.kind == kind, 0, graph.lasts_ns) for graph in graphs],
            )


def _stood(graph: Graph, kind: Kind) -> dict[int, int]:
    """By rank that does it, for how long it stood still for that, ns."""
    chosen = graph.kind == kind
    sums = graph.by_rank(np.where(chosen, graph.stood_ns, 0))
    return {rank: int(sums[rank]) for rank in sorted({*graph.on[chosen].tolist()} & graph.last.keys())}


def _where(lasts: Mapping[int, float], plan: Plan) -> str:
    """Which ranks it takes long, where those are few."""
    longest = max(lasts.values())
    most = [rank for rank, ns in lasts.items() if ns > MUCH_LESS * longest]
    if len(most) > FEW * len(lasts):
        return ""
    others = max(ns for rank, ns in lasts.items() if rank not in most)
    nodes = {plan.node_of(rank) for rank in most}
    on = f" on {nodes.pop()}" if len(nodes) == 1 else ""
    which = f"rank{'s' if len(most) > 1 else ''} {rank_ranges(most)}"
    return f" on {which}{on}, at most {others / 1e6:,.1f} ms on the others"
