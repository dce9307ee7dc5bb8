"""What each of some changes would bring: the same iterations again, with other lengths of what the change is about.

Computing and messages last as they were recorded, waiting follows anew (`reports/path/graph.py`). What a change is
about is decided by medians over the iterations; what it gains is found in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from conf.visible import numbered
from fasop.search.findings.other_plans import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.path.balance import layers_by_stage, moved_layers, replayed_plans, vocabulary
from reports.path.change import Cause, Change, Gain
from reports.path.graph import EdgeKind, Graph, Integers, median_by_rank, on_own_cores
from reports.path.links import Allowed, links
from reports.path.slow_ranks import Expected, slow_ranks

LEAST = 0.01
"""A change that gains a smaller part of an iteration is not named."""


def gains(
    recorded: Sequence[Graph],
    plan: Plan,
    searched: Sequence[FoundPlan] = (),
    expected: Expected | None = None,
    allowed: Allowed | None = None,
) -> list[Gain]:
    """Returns what each change gains, as `largest` lists them.

    Args:
        recorded: of some usual iterations, the most usual one first.
        searched: plans that a search found. One that differs in its layers per stage alone is replayed; of another one
            the iteration is multiplied by what the prediction says.
        expected: what is predicted of the stages.
        allowed: what messages and collectives may take.
    """
    now = round(float(np.median([graph.now_ns for graph in recorded])))
    graphs = on_own_cores(recorded)
    layers = [layers_by_stage(other, plan) for other in searched]
    changes = [
        *slow_ranks(graphs, plan, expected),
        *moved_layers(graphs, plan),
        *links(graphs, plan, allowed),
        *vocabulary(graphs, plan),
        *without_work(graphs, plan, allowed),
        *replayed_plans(graphs, plan, [known for known in layers if known]),
    ]
    found = [_gain(one, graphs, recorded, now) for one in changes]
    for other, replayed in zip(searched, layers, strict=True):
        if replayed is None:
            words = ", ".join(f"{key}={value}" for key, value in other.differs.items())
            found.append(
                Gain(
                    cause=Cause.PLAN,
                    change=f"the plan of tdpp search, as predicted: {words or 'the plan that this run has'}",
                    because="tdpp search predicts that another plan is faster.",
                    before_ns=now,
                    shares=[1 - other.iteration_s / other.own_s],
                    keys={f"parallel.{key}": value for key, value in other.differs.items()},
                )
            )
    return largest(found)


def largest(found: Sequence[Gain]) -> list[Gain]:
    """The plans of a search and those that gain at least LEAST, the largest first."""
    kept = (gain for gain in found if gain.share >= LEAST or gain.cause == Cause.PLAN)
    return sorted(kept, key=lambda gain: -gain.share)


def _gain(one: Change, graphs: Sequence[Graph], recorded: Sequence[Graph], now_ns: int) -> Gain:
    saved = [graph.now_ns - graph.period_ns(lasts) for graph, lasts in zip(graphs, one.lasts_ns, strict=True)]
    excess = saved
    if one.healthy_ns is not None:
        excess = [graph.now_ns - graph.period_ns(lasts) for graph, lasts in zip(graphs, one.healthy_ns, strict=True)]
    return Gain(
        cause=one.cause,
        change=one.change,
        because=one.because,
        before_ns=now_ns,
        shares=[ns / max(graph.now_ns, 1) for ns, graph in zip(saved, recorded, strict=True)],
        excess=[ns / max(graph.now_ns, 1) for ns, graph in zip(excess, graphs, strict=True)],
        keys=one.keys,
    )


REMOVABLE = (
    (EdgeKind.DATA, Cause.DATA, "no time spent loading data", "Loading data"),
    (
        EdgeKind.TENSOR,
        Cause.TENSOR,
        "no time spent on the tensor groups' communication",
        "The communication of tensor groups",
    ),
    (EdgeKind.EMBEDDING, Cause.EMBEDDING, "no time spent on the embedding's all-reduce", "The embedding's all-reduce"),
    (EdgeKind.GRADIENTS, Cause.GRADIENTS, "no time spent on the gradients' all-reduce", "The gradients' all-reduce"),
    (EdgeKind.WEIGHTS, Cause.WEIGHTS, "no time spent on the weights' all-gather", "The weights' all-gather"),
    (EdgeKind.OPTIMIZER, Cause.OPTIMIZER, "no time spent on the optimizer", "The optimizer"),
    (EdgeKind.HOST, Cause.HOST, "no time between the recorded events", "Time between the recorded events"),
)
FEW = 0.5
"""If no more than this part of the ranks that do a thing take most of its time, they are named."""
MUCH_LESS = 0.5
"""What the others take at most, as a part of the longest time."""


PEERS = (EdgeKind.OPTIMIZER, EdgeKind.HOST)
"""What every rank has to do: a rank is at fault for what it takes beyond LONGER times the median of its peers, which
for the optimizer are the other ranks of its stage."""
LONGER = 1.5


def without_work(graphs: Sequence[Graph], plan: Plan, allowed: Allowed | None = None) -> Iterator[Change]:
    """Each kind of work that takes any time. Loading data should take none; a collective takes what its bytes cost."""
    for kind, cause, change, what in REMOVABLE:
        lasts = median_by_rank([_stood(graph, kind) for graph in graphs])
        if lasts and max(lasts.values()):
            yield Change(
                cause=cause,
                change=change,
                because=f"{what} takes {max(lasts.values()) / 1e6:,.1f} ms per iteration{_where(lasts, plan)}.",
                lasts_ns=[np.where(graph.kind == kind, 0, graph.lasts_ns) for graph in graphs],
                healthy_ns=None if kind is EdgeKind.DATA else _healthy(graphs, kind, plan, allowed),
            )


def _healthy(graphs: Sequence[Graph], kind: EdgeKind, plan: Plan, allowed: Allowed | None) -> list[Integers]:
    """The lengths where no rank takes longer for a kind than it may."""
    limits = dict[int, float]()
    if kind in PEERS:
        stages = {place.rank: place.stage for place in plan.ranks}
        usual = median_by_rank([graph.sums(kind) for graph in graphs])
        for rank in usual:
            others = [usual[one] for one in usual if one != rank]
            if kind is EdgeKind.OPTIMIZER:
                others = [usual[one] for one in usual if one != rank and stages[one] == stages[rank]]
            if others:
                limits[rank] = LONGER * float(np.median(others))
    elif allowed is not None:
        ranks = {EdgeKind.TENSOR: max(plan.layout.tensors), EdgeKind.EMBEDDING: 2}.get(kind, max(plan.layout.replicas))
        for rank in graphs[0].last:
            count = int(((graphs[0].kind == kind) & (graphs[0].on == rank)).sum())
            if (ns := allowed.collectives_ns(rank, kind, count, ranks)) is not None:
                limits[rank] = ns
    return [
        graph.scaled(
            kind, {rank: min(limits.get(rank, np.inf) / max(ns, 1), 1.0) for rank, ns in graph.sums(kind).items()}
        )
        for graph in graphs
    ]


def _stood(graph: Graph, kind: EdgeKind) -> dict[int, int]:
    """Returns by rank that does such work for how long it stood still for that, ns."""
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
    which = numbered("rank", most)
    return f" on {which}{on}, at most {others / 1e6:,.1f} ms on the others"
