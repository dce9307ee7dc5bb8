"""No time for one kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from conf.run_folder.rank_ranges import rank_ranges
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change
from reports.path.graph import Graph, Kind

FREED = (
    (Kind.DATA, Cause.DATA, "no time for data loading", "Loading data"),
    (Kind.TENSOR, Cause.TENSOR, "no time for the tensor groups' communication", "The communication of tensor groups"),
    (Kind.EMBEDDING, Cause.EMBEDDING, "no time for the embedding's all-reduce", "The embedding's all-reduce"),
    (Kind.GRADIENTS, Cause.GRADIENTS, "no time for the gradients' all-reduce", "The gradients' all-reduce"),
    (Kind.WEIGHTS, Cause.WEIGHTS, "no time for the weights' all-gather", "The weights' all-gather"),
    (Kind.OPTIMIZER, Cause.OPTIMIZER, "no time for the optimizer", "The optimizer"),
    (Kind.HOST, Cause.HOST, "no time between the recorded events", "Time between the recorded events"),
)
FEW = 0.5
"""Of the ranks that do a thing: if no more take most of its time, they are named."""
MUCH_LESS = 0.5
"""Of the longest time: what the others take at most."""


def freed(graph: Graph, plan: Plan) -> Iterator[Change]:
    """Each kind of work that takes any time."""
    stood = np.array([edge.stood_ns for edge in graph.edges], np.int64)
    for kind, cause, change, what in FREED:
        chosen = graph.kind == kind
        sums = graph.by_rank(np.where(chosen, stood, 0))
        lasts = {rank: int(sums[rank]) for rank in sorted({*graph.on[chosen].tolist()} & graph.last.keys())}
        if lasts and max(lasts.values()):
            because = f"{what} takes {max(lasts.values()) / 1e6:,.1f} ms per iteration{_where(lasts, plan)}."
            yield Change(cause, change, because, np.where(chosen, 0, graph.lasts_ns))


def _where(lasts: Mapping[int, int], plan: Plan) -> str:
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
