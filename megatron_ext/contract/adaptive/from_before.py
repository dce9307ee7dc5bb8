"""What the plan of an elastic run knows of its replicas from earlier starts, for the start to come."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from megatron_ext.contract.adaptive.sizes import Way
from megatron_ext.contract.plan import Plan


def weights_of(plan: Plan) -> Sequence[float]:
    """How fast each replica is, in proportion, while this start has measured nothing."""
    elastic, adapt = plan.elastic, plan.adapt
    if elastic is None or elastic.times is None or adapt is None or not adapt.rebalance:
        return list(plan.micro_batches)
    return [elastic.weights[replica] for replica in elastic.replicas_on(plan.used, plan.tensor)]


def known_of(plan: Plan) -> List[Dict[Way, float]]:
    """By replica, the seconds of a round, by the way; empty where nothing was measured."""
    elastic = plan.elastic
    if elastic is None or elastic.times is None:
        return []
    return [
        {Way(one.size, one.streams): one.seconds for one in elastic.times[replica]}
        for replica in elastic.replicas_on(plan.used, plan.tensor)
    ]


def nodes_of(plan: Plan) -> Optional[List[str]]:
    """The node of each replica; None where these are the same in all starts."""
    if plan.elastic is None:
        return None
    return [plan.nodes[place.node].name for place in plan.ranks if place.tp == 0]
