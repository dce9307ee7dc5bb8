"""What a plan loses where a node group, a node or the links are slower than they were measured to be.

A case multiplies the predicted times of some nodes, and the plan is simulated again as it is: a launch would not know
of the slowdown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fasop.costs.hardware import NodeKind
from fasop.search.plan import Plan
from fasop.simulation.predict import predict_plan

RATED_S = 15.0
"""CPU seconds, after which no other plan is rated."""
MOST_NODES = 32
"""So many nodes of a plan are slowed down one by one, at most; of more, those at equal distances."""
COMPUTING, SENDING = ("forward", "backward", "optimizer"), ("messages", "gradients", "embedding")
"""The `Factors` of a slower GPU, and of slower links."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """What is slower, in words, and the seconds that an iteration then takes."""

    what: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Robust:
    """A plan with its worst case."""

    plan: Plan
    worst: Slowdown
    seconds: float
    """What an iteration takes where nothing is slower."""

    @property
    def loss(self) -> float:
        """What the worst case adds, as a part of the iteration."""
        return self.worst.seconds / self.seconds - 1


def slowdowns(plan: Plan, by: float) -> list[Slowdown]:
    """Simulates every case in which a part of the plan's nodes takes `by` more time, such as 0.1.

    The first entry is the plan as it is. Each node group's computing and each group's links are slowed as a whole, and
    the nodes one by one.
    """
    return [Slowdown(what="", seconds=_seconds(plan, plan.nodes)), *_cases(plan, 1.0 + by)]


def by_worst_case(plans: Sequence[Plan], by: float, most: int) -> list[Robust]:
    """Rates plans and sorts them by their worst case.

    Args:
        plans: the fastest first. Once `most` are rated, those that are slower as they are than the worst cases of so
            many cannot come before them, and are left out; so are all that `RATED_S` leaves no time for.
    """
    found: list[Robust] = []
    until = time.process_time() + RATED_S
    for plan in plans:
        slowest = sorted(one.worst.seconds for one in found)[:most]
        if (len(slowest) == most and plan.total >= slowest[-1]) or (found and time.process_time() > until):
            break
        cases = slowdowns(plan, by)
        found.append(Robust(plan=plan, worst=max(cases, key=lambda case: case.seconds), seconds=cases[0].seconds))
    return sorted(found, key=lambda one: one.worst.seconds)


def _cases(plan: Plan, factor: float) -> Iterator[Slowdown]:
    names = dict.fromkeys(node.name for node in plan.nodes)
    for what, terms in (("GPUs", COMPUTING), ("links", SENDING)):
        for name in names:
            slow = [_slower(node, terms, factor) if node.name == name else node for node in plan.nodes]
            yield Slowdown(what=f"the {what} of {name}", seconds=_seconds(plan, slow))
    if len(plan.nodes) == len(names):  # each node is its group
        return
    step = -(-len(plan.nodes) // MOST_NODES)
    for place in range(0, len(plan.nodes), step):
        name = plan.nodes[place].name
        alone = f"node {place} of the order ({name})"
        nodes = [_knows(node, name, alone) for node in plan.nodes]
        nodes[place] = replace(_slower(nodes[place], COMPUTING, factor), name=alone)
        yield Slowdown(what=alone, seconds=_seconds(plan, nodes))


def _seconds(plan: Plan, nodes: Sequence[NodeKind]) -> float:
    return predict_plan(replace(plan, nodes=nodes)).iteration_s


def _slower(node: NodeKind, terms: Sequence[str], factor: float) -> NodeKind:
    own = node.factors
    return replace(node, factors=replace(own, **{term: getattr(own, term) * factor for term in terms}))


def _knows(node: NodeKind, name: str, alone: str) -> NodeKind:
    """The node, whose links to a node of its own name are those to the nodes of that group."""
    return replace(node, links={**node.links, alone: node.links[name]}) if name in node.links else node
