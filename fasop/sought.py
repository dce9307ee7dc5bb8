"""What a command line searches: the best plans of a cluster, or the front of time against cost over all its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fasop.asked import Asked, First
from fasop.candidates import MOST_MICRO_BATCHES, Space, any_space, space
from fasop.clusters import clusters, tried
from fasop.floor import floor
from fasop.hardware import NodeKind
from fasop.inputs import Inputs
from fasop.orders import MOST, searched
from fasop.pareto import Front, Limits, nothing_within
from fasop.prices import check_prices
from fasop.progress import bar
from fasop.proof import prove
from fasop.search import Best, Keep, Plan, explore
from fasop.training import Training

FRONT_ORDERS = 30
"""Node orders of a set of nodes that are all searched for a front, which has many such sets."""
OPTIMAL = 1e-5
"""A part of an iteration that nobody could measure."""


@dataclass(frozen=True, kw_only=True)
class Sought:
    plans: Sequence[Plan]
    told: str
    """In words, what was searched."""


def best_plans(inputs: Inputs, asked: Asked) -> Sought:
    """The fastest plans.

    Raises:
        SearchError: there are none, with what would help.
    """
    best = Best(max(asked.top, asked.explain or 0))
    orders = searched([kind.group.count for kind in inputs.kinds])
    with bar("searching") as told:
        if asked.leave_out:
            some = clusters(inputs.kinds)
            seen = explore(_spaces(inputs, some, best, MOST), best, len(some), told)
            where = f"{seen.candidates} plans on {tried(inputs.kinds)} were looked at, at most in {orders}"
        else:
            seen = explore([space(inputs.training, inputs.kinds, inputs.choices)], best, told=told)
            where = f"{seen.candidates} plans fit, {seen.too_large} do not; {orders}"
    if not best.plans:
        space(inputs.training, inputs.kinds, inputs.choices)  # tells why
    plans = best.plans
    if asked.prove:
        with bar("proving") as told:
            plans = prove(plans, told)
    if inputs.training.parallel.global_batch_size > MOST_MICRO_BATCHES:
        where += f"; none with more than {MOST_MICRO_BATCHES} micro-batches for each replica"
    not_shown = (
        "All other plans were slower in the search, which improves the layers per stage of each step by step, or are "
        "proved to be slower."
    )
    closer = "" if asked.prove or plans[0].gap < OPTIMAL else " prove=true looks closer."
    return Sought(plans=plans, told=f"{where}. {not_shown} {best_layers(plans[0].gap)}{closer}")


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
    plans = _front(inputs, limits)
    if not plans:
        raise nothing_within(_front(inputs, Limits()), inputs.run, limits)
    sets = f"{tried(inputs.kinds)}, of each all node orders up to {FRONT_ORDERS}, else groups' nodes kept together"
    whole = f"the whole training has {inputs.run.iterations} iterations"
    told = (
        f"{len(plans)} plans that no other one beats in time and cost: {sets}. Prices are those of the nodes that "
        f"a plan uses; {whole if inputs.run.known else 'tokens=N adds what a whole training takes'}."
    )
    return Sought(plans=plans if asked.pareto is First.time else plans[::-1], told=told)


def _front(inputs: Inputs, limits: Limits) -> Sequence[Plan]:
    kept, some = Front(inputs.run, limits), clusters(inputs.kinds)
    with bar("searching") as told:
        explore(_spaces(inputs, some, kept, FRONT_ORDERS), kept, len(some), told)
    if not kept.plans and limits == Limits():
        space(inputs.training, inputs.kinds, inputs.choices)  # tells why
    return kept.plans


def _spaces(inputs: Inputs, some: Sequence[Sequence[NodeKind]], keep: Keep, most_orders: int) -> Iterator[Space]:
    """The candidates of each set of nodes, without those that the floor alone leaves out."""
    for kinds in some:

        def worth(sized: Training, kinds: Sequence[NodeKind] = kinds) -> bool:
            return bool(keep.worth(kinds, np.array([floor(sized, kinds)]))[0])

        yield any_space(inputs.training, kinds, inputs.choices, worth, most_orders)
