"""GPUs that a plan takes and that compute nothing: those of stages without layers, but for the first and the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema.values.partition import NodeOrder
from fasop.search.plan import Plan, price_per_hour

ALIKE = 5e-4
"""A part of an iteration; plans that differ by less are as fast."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The GPUs that one plan leaves idle."""

    gpus: int
    whole: Sequence[str]
    """The groups of nodes of which no GPU computes anything, node by node."""
    where: str
    """In words, on which nodes; empty if there are none."""


def idle(plan: Plan) -> Idle:
    """The first stage has the embedding and the last one the head, so they compute in any case."""
    parallel, stages = plan.training.parallel, plan.training.parallel.pipeline
    widths = [
        tensor * replicas for tensor, replicas in zip(parallel.layout.tensors, parallel.layout.replicas, strict=True)
    ]
    of_rank = [stage for stage, width in enumerate(widths) for _ in range(width)]
    empty = [not any(plan.partition.layers[stage::stages]) and 0 < stage < stages - 1 for stage in range(stages)]
    whole, parts, rank = [], [], 0
    for node in plan.nodes:
        here = sum(empty[of_rank[rank + gpu]] for gpu in range(node.gpus))
        rank += node.gpus
        if here == node.gpus:
            whole.append(node.name)
        elif here:
            parts.append(f"{here} of {node.gpus} GPUs of {node.name}")
    where = [str(NodeOrder(tuple(whole)))] if whole else []
    counted = [f"{part} (on {parts.count(part)} nodes)" if parts.count(part) > 1 else part for part in parts]
    gpus = sum(width for width, none in zip(widths, empty, strict=True) if none)
    return Idle(gpus=gpus, whole=tuple(whole), where=", ".join([*where, *dict.fromkeys(counted)]))


def marked(plan: Plan) -> str:
    """How many GPUs of a plan compute nothing, and where; empty if all compute."""
    found = idle(plan)
    return f"{found.gpus} of {plan.parallel.world_size}: {found.where}" if found.gpus else ""


def left(plan: Plan) -> Counter[str]:
    """The nodes of a plan, by group, but for those that compute nothing."""
    return Counter(node.name for node in plan.nodes) - Counter(idle(plan).whole)


def within(plans: Sequence[Plan], nodes: Counter[str]) -> Plan | None:
    """The first plan that takes no more than these nodes."""
    return next((plan for plan in plans if Counter(node.name for node in plan.nodes) <= nodes), None)


def notes(plans: Sequence[Plan], others: Sequence[Plan] = ()) -> list[str]:
    """A sentence for each plan that leaves GPUs idle: how many, on which nodes, and the best one without these nodes,
    of `plans` or of `others`, which are not shown. The fastest come first.
    """
    found = []
    for number, plan in enumerate(plans, 1):
        if not (mark := marked(plan)):
            continue
        sentence = f"plan {number} leaves GPUs without layers idle, {mark}"
        known = sorted([*plans, *others], key=lambda one: one.total)
        best = within(known, left(plan)) if idle(plan).whole else None
        if best is not None:
            row = next((f"plan {row}" for row, one in enumerate(plans, 1) if one is best), None)
            name = row or f"{best.parallel.node_order}, which leave_out=true shows,"
            sentence += f"; without these nodes {name} is the best: {_compared(best, plan)}"
        found.append(sentence)
    return found


def _compared(one: Plan, other: Plan) -> str:
    change = one.total / other.total - 1
    speed = "as fast" if abs(change) < ALIKE else f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    prices = [price_per_hour(plan.nodes) for plan in (one, other)]
    if None in prices:
        return f"{speed}, on {one.parallel.world_size} GPUs instead of {other.parallel.world_size}"
    return f"{speed}, for ${prices[0]:.2f} an hour instead of ${prices[1]:.2f}"
