"""What each of some changes would bring: the same iteration again, with other lengths of what the change is about.

Computing and messages last as they were recorded, waiting follows anew (`reports/path/graph.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fasop.search.findings.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change, Gain
from reports.path.freed import freed
from reports.path.graph import Graph
from reports.path.layers import layers_by_stage, moved_layers, replayed_plans
from reports.path.links import links
from reports.path.slow_ranks import Expected, slow_ranks

LEAST = 0.01
"""Of an iteration: a change that gains less is not named."""


def gains(graph: Graph, plan: Plan, searched: Sequence[FoundPlan] = (), expected: Expected | None = None) -> list[Gain]:
    """The changes that gain at least LEAST of an iteration, the largest gain first.

    Args:
        searched: plans that a search found. One that differs in its layers per stage alone is replayed; of another one
            the iteration is multiplied by what the prediction says.
        expected: what is predicted of the stages.
    """
    now = graph.period_ns()
    layers = [layers_by_stage(other, plan) for other in searched]
    changes = [
        *slow_ranks(graph, plan, expected),
        *moved_layers(graph, plan),
        *links(graph, plan),
        *freed(graph, plan),
        *replayed_plans(graph, plan, [known for known in layers if known]),
    ]
    found = [_gain(one, graph.period_ns(one.lasts_ns), now) for one in changes]
    for other, replayed in zip(searched, layers, strict=True):
        if replayed is None:
            words = ", ".join(f"{key}={value}" for key, value in other.differs.items())
            found.append(
                Gain(
                    cause=Cause.PLAN,
                    change=f"the plan of tdpp search, as predicted: {words}",
                    because="tdpp search predicts that another plan is faster.",
                    before_ns=now,
                    period_ns=round(now * other.iteration_s / other.own_s),
                )
            )
    return largest(found)


def largest(found: Sequence[Gain]) -> list[Gain]:
    """Those that gain at least LEAST, the largest first."""
    return sorted((gain for gain in found if gain.share >= LEAST), key=lambda gain: -gain.share)


def _gain(one: Change, period_ns: int, now_ns: int) -> Gain:
    return Gain(cause=one.cause, change=one.change, because=one.because, before_ns=now_ns, period_ns=period_ns)
