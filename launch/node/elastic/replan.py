"""The next plan of an elastic run, by what its replicas were measured to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, TypeVar

from launch.errors import LaunchError
from launch.files.records import Start
from megatron_ext.contract.adaptive.shares import Measured, Replica, Way, fastest, fastest_division, rounds, ways_of
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Elastic, NodeSetPlan, Place, RoundTime

_Of = TypeVar("_Of")
CUT = (
    *("tensor", "data", "pipeline", "chunks", "partition", "sequence_parallel", "recompute", "sharded_optimizer"),
    *("hierarchical_stages", "schedule", "shares", "tensors", "replicas"),
)
"""What `NodeSetPlan` has of a plan."""


def replanned(plan: Plan, nodes: Collection[int]) -> Plan:
    """An elastic plan in which these nodes take part; the others stay in it without ranks.

    The micro-batches are those of the plan. Replicas share them by their speeds, so that the slowest one ends soonest;
    each keeps its streams, and what it may have instead. Where a replica's stages lie on several nodes, the
    fastest of the plans that the launch made for sets of nodes is taken, which may leave nodes out.

    Raises:
        LaunchError: the launch made no plan for any of these nodes.
    """
    elastic, adapt = plan.elastic, plan.adapt
    assert elastic is not None
    if elastic.plans is not None:
        return _cut_anew(plan, nodes, elastic, elastic.plans)
    taking = [node for node in range(len(plan.nodes)) if node in nodes]
    replicas = elastic.replicas_on(taking, plan.tensor)
    node_of = [node for node in taking for _ in range(elastic.ranks[node])]
    streams = _of(elastic.streams, replicas)
    shares = _shares(plan, [1.0 / elastic.weights[replica] for replica in replicas], streams)
    sized = replace(
        plan,
        data=len(replicas),
        shares=list(shares) if len({*shares}) > 1 else None,
        streams=streams,
        adapt=adapt
        and replace(
            adapt,
            micro_batch_sizes=_of(elastic.micro_batch_sizes, replicas),
            streams=_of(elastic.numbers_of_streams, replicas),
        ),
    )
    return _placed(sized, node_of, elastic.prices)


def _placed(plan: Plan, node_of: Sequence[int], prices: Sequence[float] | None) -> Plan:
    """The plan with its ranks on these nodes, of which `node_of` has one for each rank, and their price."""
    price = None if prices is None else sum(prices[node] for node in dict.fromkeys(node_of))
    return replace(
        plan,
        train=plan.train if plan.train.max_cost is None else replace(plan.train, price_per_hour=price),
        nodes=[
            replace(node, ranks=[rank for rank, of in enumerate(node_of) if of == node_rank])
            for node_rank, node in enumerate(plan.nodes)
        ],
        ranks=[
            Place(rank, node, rank - node_of.index(node), *plan.layout.stage_dp_tp(rank))
            for rank, node in enumerate(node_of)
        ],
    )


def _cut_anew(plan: Plan, nodes: Collection[int], elastic: Elastic, known: Sequence[NodeSetPlan]) -> Plan:
    """The first of the known plans whose nodes are among these; of the nodes of a group the first ones take part."""
    there = Counter(plan.nodes[node].group for node in nodes)
    chosen = next((one for one in known if Counter(one.groups) <= there), None)
    if chosen is None:
        listed = ", ".join(f"{count} of {group}" for group, count in sorted(there.items()))
        raise LaunchError(f"cannot continue: the launch found no plan for the nodes that are left ({listed})")
    of_group = {group: iter(sorted(node for node in nodes if plan.nodes[node].group == group)) for group in there}
    order = [next(of_group[group]) for group in chosen.groups]
    node_of = [node for node, count in zip(order, chosen.counts, strict=True) for _ in range(count)]
    model = replace(plan.model, padded_vocab_size=chosen.padded_vocab_size)
    cut = replace(plan, model=model, **{key: getattr(chosen, key) for key in CUT})
    return _placed(cut, node_of, elastic.prices)


def _of(every: Sequence[_Of] | None, replicas: Sequence[int]) -> list[_Of] | None:
    return None if every is None else [every[replica] for replica in replicas]


def _shares(plan: Plan, seconds: Sequence[float], streams: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batches of each replica, one of which takes it so many seconds."""
    count = plan.global_batch_size // plan.micro_batch_size
    if streams is None:
        return fastest(seconds, count)
    rounds = [Replica({Way(plan.micro_batch_size, of): of * took}) for of, took in zip(streams, seconds, strict=True)]
    found = fastest_division(rounds, count * plan.micro_batch_size)
    assert found is not None, "micro-batches of the plan's size give every batch"
    return found.shares


def of_start(lines: Iterable[Mapping[str, Any]], start: Start) -> list[Mapping[str, Any]]:
    """Reads from decisions.jsonl what the ranks of a start have measured."""
    return [line for line in lines if line.get("start") == str(start) and line.get("micro_batch_ms") is not None]


def with_measured(plan: Plan, lines: Iterable[Mapping[str, Any]]) -> Plan:
    """An elastic plan whose replicas are as fast as they were measured to be, if shares follow measured times.

    Those that have measured nothing are as much faster or slower than predicted as others of their group are, or else
    as all are.
    `lines` are decisions of the plan's own start, in their order.
    """
    elastic, adapt = plan.elastic, plan.adapt
    assert elastic is not None
    if adapt is None or not adapt.rebalance:
        return plan
    whole = replace(adapt, micro_batch_sizes=elastic.micro_batch_sizes, streams=elastic.numbers_of_streams)
    copies = elastic.streams or [1] * len(elastic.weights)
    found = [Measured(ways) for ways in ways_of(whole, plan.micro_batch_size, copies)]
    for measured, times in zip(found, elastic.times or (), strict=False):
        for one in times:
            measured.note(Way(one.size, one.streams), one.seconds)
    here = elastic.replicas_on(plan.used, plan.tensor)
    for line in lines:
        keys = ("shares_before", "micro_batch_sizes_before", "streams_before", "micro_batch_ms")
        for replica, count, size, streams, ms in zip(here, *(line[key] for key in keys), strict=True):
            if ms > 0.0:
                found[replica].note(Way(size, streams), ms / 1e3 * count / rounds(count, streams))
    seconds = dict[int, float]()
    for replica, (measured, streams) in enumerate(zip(found, copies, strict=True)):
        expected = measured.expected()
        if expected:
            seconds[replica] = expected[Way(plan.micro_batch_size, streams)] / streams
    if not seconds:
        return plan
    groups = [node.group for node in plan.nodes]
    node_of = [node for node, count in enumerate(elastic.ranks) for _ in range(count // plan.tensor)]
    choosing = elastic.choosing
    if choosing is not None:
        of_node = {
            node: mean(own)
            for node in range(len(groups))
            if (own := [took for replica, took in seconds.items() if node_of[replica] == node])
        }
        choosing = replace(choosing, micro_batch_s=_filled(of_node, choosing.micro_batch_s, groups))
    filled = _filled(seconds, [1.0 / weight for weight in elastic.weights], [groups[node] for node in node_of])
    return replace(
        plan,
        elastic=replace(
            elastic,
            weights=[1.0 / took for took in filled],
            choosing=choosing,
            times=[
                [RoundTime(way.size, way.streams, took) for way, took in measured.known.items()] for measured in found
            ],
        ),
    )


def _filled(measured: Mapping[int, float], predicted: Sequence[float], groups: Sequence[str]) -> list[float]:
    """Seconds, by place: measured where they were."""
    ratios = {place: took / predicted[place] for place, took in measured.items()}

    def expected(place: int) -> float:
        alike = [ratio for other, ratio in ratios.items() if groups[other] == groups[place]]
        return predicted[place] * median(alike or ratios.values())

    return [measured.get(place, expected(place)) for place in range(len(predicted))]
