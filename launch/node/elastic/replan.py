"""The plan of an elastic run with other nodes: whole replicas on each of them, and the same batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_ext.contract.adaptive.shares import fastest
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place


def replanned(plan: Plan, nodes: Collection[int]) -> Plan:
    """An elastic plan in which these nodes take part; the others stay in it without ranks.

    The micro-batches are those of the plan. Replicas share them by the speeds of their nodes, so that the slowest one
    ends soonest.
    """
    elastic = plan.elastic
    assert elastic is not None
    taking = [node for node in range(len(plan.nodes)) if node in nodes]
    node_of = [node for node in taking for _ in range(elastic.ranks[node])]
    data = len(node_of) // plan.tensor
    layout = Layout.grid(plan.tensor, data, 1)
    seconds = [1.0 / elastic.weights[node] for node in node_of[:: plan.tensor]]
    shares = fastest(seconds, plan.global_batch_size // plan.micro_batch_size)
    price = None if elastic.prices is None else sum(elastic.prices[node] for node in taking)
    return replace(
        plan,
        data=data,
        train=plan.train if plan.train.max_cost is None else replace(plan.train, price_per_hour=price),
        shares=list(shares) if len({*shares}) > 1 else None,
        nodes=[
            replace(node, ranks=[rank for rank, of in enumerate(node_of) if of == node_rank])
            for node_rank, node in enumerate(plan.nodes)
        ],
        ranks=[
            Place(rank, node, rank - node_of.index(node), *layout.stage_dp_tp(rank))
            for rank, node in enumerate(node_of)
        ],
    )
