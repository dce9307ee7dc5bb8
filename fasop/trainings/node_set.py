"""The sets of nodes of a cluster that a training may use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.schema.values.partition import NodeOrder
from fasop.trainings.play import Nodes

MOST = 300
"""Sets that are played; of a cluster with more, the numbers of a group's nodes go up in steps."""


@dataclass(frozen=True, kw_only=True)
class NodeSet:
    """Some nodes, which a training can use."""

    name: str
    """The nodes, written as a node order."""
    gpus: int
    price_per_hour: float | None
    """US dollars, of all of them; None: not known."""
    nodes: Nodes


def orders(whole: NodeOrder) -> list[NodeOrder]:
    """All of its nodes first, then every other number of nodes of its groups; which node of a group it is does not
    matter."""
    counts = {name: whole.groups.count(name) for name in dict.fromkeys(whole.groups)}
    by = next((by for by in range(1, max(counts.values()) + 1) if _number(counts, by) <= MOST), max(counts.values()))
    numbers = [[*range(0, count, by), count] for count in counts.values()]
    found = [
        _some(whole, dict(zip(counts, some, strict=True)))
        for some in itertools.islice(itertools.product(*(reversed(of) for of in numbers)), MOST)
        if any(some)
    ]
    return sorted(found, key=lambda order: -len(order.groups))


def _number(counts: Mapping[str, int], by: int) -> int:
    return math.prod(-(-count // by) + 1 for count in counts.values())


def _some(whole: NodeOrder, counts: dict[str, int]) -> NodeOrder:
    """The first nodes of each group."""
    left, kept = dict(counts), []
    for name in whole.groups:
        if left[name]:
            left[name] -= 1
            kept.append(name)
    return NodeOrder(tuple(kept))


def total(prices: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None
