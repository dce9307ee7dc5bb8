"""What each of some changes would bring: the same iterations again, with other lengths of what the change is about.

Computing and messages last as they were recorded, waiting follows anew (`reports/path/graph.py`). What a change is
about is decided by medians over the iterations; what it gains is found in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fasop.search.findings.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.path.allowed import Allowed
from reports.path.change import Cause, Change, Gain
from reports.path.freed import freed
from reports.path.graph import Graph
from reports.path.layers import layers_by_stage, moved_layers, replayed_plans
from reports.path.links import links
from reports.path.own_cores import on_own_cores
from reports.path.slow_ranks import Expected, slow_ranks
from reports.path.vocabulary import vocabulary

LEAST = 0.01
"""Of an iteration: a change that gains less is not named."""


def gains(
    recorded: Sequence[Graph],
    plan: Plan,
    searched: Sequence[FoundPlan] = (),
    expected: Expected | None = None,
    allowed: Allowed | None = None,
) -> list[Gain]:
    """As `largest`, of all changes.

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
        *freed(graphs, plan, allowed),
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
    beyond = saved
    if one.healthy_ns is not None:
        beyond = [graph.now_ns - graph.period_ns(lasts) for graph, lasts in zip(graphs, one.healthy_ns, strict=True)]
    return Gain(
        cause=one.cause,
        change=one.change,
        because=one.because,
        before_ns=now_ns,
        shares=[ns / max(graph.now_ns, 1) for ns, graph in zip(saved, recorded, strict=True)],
        beyond=[ns / max(graph.now_ns, 1) for ns, graph in zip(beyond, graphs, strict=True)],
        keys=one.keys,
    )
