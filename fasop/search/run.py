"""What a command line searches: the best plans of a cluster, or the front of time against cost over all its sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fasop.costs.hardware import NodeKind
from fasop.search.arguments import Asked, First
from fasop.search.candidates import MOST_MICRO_BATCHES, Space, space
from fasop.search.clusters import clusters, tried
from fasop.search.idle import idle, left, notes, within
from fasop.search.inputs import Inputs
from fasop.search.lower_bound import Floors
from fasop.search.orders import searched
from fasop.search.pareto import Front, Limits, nothing_within
from fasop.search.prices import check_prices
from fasop.search.progress import bar
from fasop.search.proof import prove
from fasop.search.search import Best, Plan, Seen, by_time, explore

LIMIT_S = 45.0
"""CPU seconds of a search, after which it begins nothing new: nobody waits longer than a minute for an answer."""
SETS_S = 27.0
"""Of them, those for all sets of nodes; where that is too little, the rest is for all nodes together."""
OPTIMAL = 1e-5
"""A part of an iteration that nobody could measure."""


@dataclass(frozen=True, kw_only=True)
class Sought:
    plans: Sequence[Plan]
    told: str
    """In words, what was searched."""
    notes: Sequence[str]
    """What a reader must know of single plans."""


def best_plans(inputs: Inputs, asked: Asked) -> Sought:
    """The fastest plans.

    Raises:
        SearchError: there are none, with what would help.
    """
    begun = time.process_time()
    best = Best(max(asked.top, asked.explain or 0))
    some = clusters(inputs.kinds) if asked.leave_out else [inputs.kinds]
    with bar("searching") as told:
        seen = explore(_spaces(inputs, some), best, told, begun + (LIMIT_S if len(some) == 1 else SETS_S))
        if seen.left and len(some) > 1:  # the nodes that were looked at may be far from the best
            explore(_spaces(inputs, [inputs.kinds]), best, told, begun + LIMIT_S)
    if not best.plans:
        space(inputs.training, inputs.kinds, inputs.choices)  # tells why
    where = _looked_at(inputs, seen, tried(inputs.kinds) if asked.leave_out else "all nodes")
    others = _without_idle_nodes(inputs, best.plans, begun + LIMIT_S)
    plans = best.plans
    if asked.leave_out:
        plans, others = sorted([*plans, *others], key=by_time), []
    if asked.prove:
        with bar("proving") as told:
            plans = prove(plans, told)
    not_shown = (
        "All other plans were slower in the search, which improves the layers per stage of each step by step, or are "
        "proved to be slower."
    )
    closer = "" if asked.prove or plans[0].gap < OPTIMAL else " prove=true looks closer."
    any_plan = proved_of_all(min(seen.least, plans[0].bound), plans[0].total)
    told_all = f"{where}. {_nodes_used(inputs, plans[0])}{not_shown} {any_plan}{best_layers(plans[0].gap)}{closer}"
    return Sought(plans=plans, told=told_all, notes=notes(plans, others))


def _without_idle_nodes(inputs: Inputs, plans: Sequence[Plan], until: float) -> list[Plan]:
    """The best plans on the nodes of plans but for those that compute nothing, where `plans` have none there."""
    found, left_to_see, seen = list[Plan](), [*plans], set[tuple[tuple[str, int], ...]]()
    while left_to_see:
        plan = left_to_see.pop(0)
        nodes = left(plan)
        if not idle(plan).whole or within([*plans, *found], nodes) or tuple(sorted(nodes.items())) in seen:
            continue
        seen.add(tuple(sorted(nodes.items())))
        kinds = [
            replace(kind, group=replace(kind.group, count=nodes[kind.name]))
            for kind in inputs.kinds
            if nodes[kind.name]
        ]
        best = Best(1)
        explore(_spaces(inputs, [kinds]), best, until=until)
        found += best.plans
        left_to_see += best.plans
    return found


def _nodes_used(inputs: Inputs, plan: Plan) -> str:
    """In words, that the best plan leaves nodes out."""
    every = sum(kind.group.count for kind in inputs.kinds)
    if len(plan.nodes) == every:
        return ""
    return f"The first plan uses {len(plan.nodes)} of {every} nodes; leave_out=false asks for plans on all of them. "


def _looked_at(inputs: Inputs, seen: Seen, sets: str) -> str:
    """In words, what a search has gone through."""
    orders = searched([kind.group.count for kind in inputs.kinds])
    limited = (
        f"; none with more than {MOST_MICRO_BATCHES} micro-batches for each replica"
        if inputs.training.parallel.global_batch_size > MOST_MICRO_BATCHES
        else ""
    )
    left = f"; for lack of time, {seen.left} of these were left out that may be better" if seen.left else ""
    return f"{seen.sizes} sizes with a schedule were looked at, on {sets}, {orders}{limited}{left}"


def proved_of_all(least: float, seconds: float) -> str:
    """What is proved of all plans that were looked at, if none takes less than `least`."""
    return f"No plan at all is more than {max(1 - least / seconds, 1e-3):.1%} faster than the first: this is proved. "


def best_layers(gap: float) -> str:
    """What is proved of the first plan's layers per stage."""
    if gap < OPTIMAL:
        return "With its sizes and node order, the first plan has the best layers per stage: this is proved."
    return (
        f"With its sizes and node order, other layers per stage would make the first plan at most {max(gap, 1e-3):.1%} "
        "faster."
    )


def front(inputs: Inputs, asked: Asked) -> Sought:
    """The plans that no other one beats in both time and cost, in the order that is asked for.

    Raises:
        SearchError: a node has no price, or no plan is within the limits.
    """
    check_prices(inputs.kinds)
    limits = Limits(cost=asked.max_cost, days=asked.max_days)
    plans, seen = _front(inputs, limits)
    if not plans:
        raise nothing_within(_front(inputs, Limits())[0], inputs.run, limits)
    where = _looked_at(inputs, seen, tried(inputs.kinds))
    whole = f"the whole training has {inputs.run.iterations} iterations"
    told = (
        f"{len(plans)} plans that no other one beats in time and cost. {where}. Prices are those of the nodes that "
        f"a plan uses; {whole if inputs.run.known else 'tokens=N adds what a whole training takes'}."
    )
    shown = plans if asked.pareto is First.time else plans[::-1]
    return Sought(plans=shown, told=told, notes=notes(shown))


def _front(inputs: Inputs, limits: Limits) -> tuple[Sequence[Plan], Seen]:
    kept = Front(inputs.run, limits)
    until = time.process_time() + LIMIT_S
    with bar("searching") as told:
        seen = explore(_spaces(inputs, clusters(inputs.kinds)), kept, told, until)
    if not kept.plans and limits == Limits():
        space(inputs.training, inputs.kinds, inputs.choices)  # tells why
    return kept.plans, seen


def _spaces(inputs: Inputs, some: Sequence[Sequence[NodeKind]]) -> list[Space]:
    floors = Floors(inputs.kinds)
    return [Space(inputs.training, kinds, inputs.choices, floors) for kinds in some]
