"""The plan of an elastic run with other nodes: whole replicas on each of them, and the same batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from megatron_ext.contract.adaptive import sizes
from megatron_ext.contract.adaptive.shares import fastest
from megatron_ext.contract.adaptive.sizes import Replica, Way
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place

_Of = TypeVar("_Of")


def replanned(plan: Plan, nodes: Collection[int]) -> Plan:
    """An elastic plan in which these nodes take part; the others stay in it without ranks.

    The micro-batches are those of the plan. Replicas share them by their speeds, so that the slowest one ends soonest;
    each keeps its streams, and what it may have instead.
    """
    elastic, adapt = plan.elastic, plan.adapt
    assert elastic is not None
    taking = [node for node in range(len(plan.nodes)) if node in nodes]
    replicas = elastic.replicas_on(taking, plan.tensor)
    node_of = [node for node in taking for _ in range(elastic.ranks[node])]
    layout = Layout.grid(plan.tensor, len(replicas), 1)
    streams = _of(elastic.streams, replicas)
    shares = _shares(plan, [1.0 / elastic.weights[replica] for replica in replicas], streams)
    price = None if elastic.prices is None else sum(elastic.prices[node] for node in taking)
    return replace(
        plan,
        data=len(replicas),
        train=plan.train if plan.train.max_cost is None else replace(plan.train, price_per_hour=price),
        shares=list(shares) if len({*shares}) > 1 else None,
        streams=streams,
        adapt=adapt
        and replace(
            adapt,
            micro_batch_sizes=_of(elastic.micro_batch_sizes, replicas),
            streams=_of(elastic.numbers_of_streams, replicas),
        ),
        nodes=[
            replace(node, ranks=[rank for rank, of in enumerate(node_of) if of == node_rank])
            for node_rank, node in enumerate(plan.nodes)
        ],
        ranks=[
            Place(rank, node, rank - node_of.index(node), *layout.stage_dp_tp(rank))
            for rank, node in enumerate(node_of)
        ],
    )


def _of(every: Sequence[_Of] | None, replicas: Sequence[int]) -> list[_Of] | None:
    return None if every is None else [every[replica] for replica in replicas]


def _shares(plan: Plan, seconds: Sequence[float], streams: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batches of each replica, one of which takes it so many seconds."""
    count = plan.global_batch_size // plan.micro_batch_size
    if streams is None:
        return fastest(seconds, count)
    rounds = [Replica({Way(plan.micro_batch_size, of): of * took}) for of, took in zip(streams, seconds, strict=True)]
    found = sizes.fastest(rounds, count * plan.micro_batch_size)
    assert found is not None, "micro-batches of the plan's size give every batch"
    return found.shares
