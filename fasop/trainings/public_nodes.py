"""Servers that IIDP or JABAS profiled, with the exact division of every batch: local batch size, virtual workers and
passes of accumulation may change with it, as they do there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import gcd

from conf.schema.partition import NodeOrder
from fasop.errors import SearchError
from fasop.partition.exact_shares import Units, least_time
from fasop.shares.performance import Pace, WeightSync, all_reduces, paces
from fasop.shares.public_files import Cluster, Server
from fasop.shares.solution import check_unit, seconds_by_number, sizes_of
from fasop.trainings.node_set import NodeSet, total
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.deal import Division


class PublicNodes:
    """Some servers; a replica stands for so many GPUs that the rules' even numbers of micro-batches divide among
    units."""

    ways = None
    pipelined = False

    def __init__(self, cluster: Cluster, sync: WeightSync, sizes: Sequence[int], unit: int) -> None:
        """`sizes` are local batch sizes, of which the best is taken for each batch."""
        self._cluster, self._sync, self._sizes, self._unit = cluster, sync, sizes, unit
        self._step = step(sizes, unit)
        self._known: dict[int, float] = {}
        gpus = sum(server.gpus for server in cluster.servers)
        self.weights = (1,) * max(1, gpus * min(sizes) // self._step)
        self.streams = (1,) * len(self.weights)
        self._sum_s = max(sum(all_reduces(cluster, server)) for server in cluster.servers)

    def seconds(self, division: Division, measures: bool = False) -> float:
        """Of the best local batch size. A batch that cannot be divided, as the last one of a training may be, takes
        what the next larger one does. One that measures sums a second gradient."""
        of_unit = min(self._sizes) * self._unit
        batch = -(-sum(division.shares) * self._step // of_unit) * of_unit
        if batch not in self._known:
            self._known[batch] = min(self._of_size(batch, size) for size in self._sizes)
        return self._known[batch] + (self._sum_s if measures else 0.0)

    def times(self, division: Division, iterations: int, measures: bool) -> Times | None:
        return None

    def _of_size(self, batch: int, size: int) -> float:
        total, left = divmod(batch, size * self._unit)
        if left:
            return math.inf
        units = [Units(count, seconds_by_number(own, total)) for own, count in self._kinds[size]]
        found = least_time(units, total)
        return math.inf if found is None else found.seconds

    @cached_property
    def _kinds(self) -> dict[int, list[tuple[list[Pace], int]]]:
        """By local batch size: the paces of units that are alike, and how many these are."""
        return {size: self._alike(size) for size in self._sizes}

    def _alike(self, size: int) -> list[tuple[list[Pace], int]]:
        counts: dict[tuple[Pace, ...], int] = {}
        of_kind: dict[Server, tuple[Pace, ...]] = {}
        for server in self._cluster.servers:
            kind = replace(server, name="", gpus=1)
            if kind not in of_kind:
                of_kind[kind] = tuple(paces(self._cluster, server, size, self._sync))
            counts[of_kind[kind]] = counts.get(of_kind[kind], 0) + server.gpus // self._unit
        return [([*own], count) for own, count in counts.items()]


def step(sizes: Sequence[int], unit: int) -> int:
    """Samples by which batches differ, half of it: every even number of it divides among units."""
    of_unit = min(sizes) * unit
    return of_unit // 2 if unit % 2 == 0 else of_unit


def node_sets(
    cluster: Cluster,
    sync: WeightSync,
    orders: Sequence[NodeOrder],
    size: int | None,
    unit: int | None,
    prices: Mapping[str, float],
) -> list[NodeSet]:
    """Those of the orders, whose groups are named as `kinds_of` does; `prices` are by group, US dollars an hour.

    Raises:
        SearchError: the local batch size was not measured, or a unit fits no server.
    """
    unit = unit_of(cluster, unit)
    sizes, kinds = sizes_of(cluster, size), kinds_of(cluster)
    found = []
    for order in orders:
        left = {name: iter(servers) for name, servers in kinds.items()}
        some = replace(cluster, servers=tuple(next(left[name]) for name in order.groups))
        found.append(
            NodeSet(
                name=str(order),
                gpus=sum(server.gpus for server in some.servers),
                price_per_hour=total([prices.get(name) for name in order.groups]),
                nodes=PublicNodes(some, sync, sizes, unit),
            )
        )
    return found


def unit_of(cluster: Cluster, given: int | None) -> int:
    """GPUs that work alike, as given or as the configuration says, or the most that divide every server.

    Raises:
        SearchError: they do not divide the GPUs of a server.
    """
    unit = given or cluster.unit or gcd(*(server.gpus for server in cluster.servers))
    check_unit(cluster.servers, unit)
    return unit


def kinds_of(cluster: Cluster) -> dict[str, list[Server]]:
    """Servers with the same GPUs and links, by the name of the first of them; their measured times may differ."""
    kinds: dict[Server, list[Server]] = {}
    for server in cluster.servers:
        kinds.setdefault(replace(server, name="", measured_as=""), []).append(server)
    return {servers[0].name: servers for servers in kinds.values()}


def whole_order(cluster: Cluster) -> NodeOrder:
    """Of all servers, by the names of their kinds.

    Raises:
        SearchError: a server has a name that no node order can have.
    """
    counts = {name: len(servers) for name, servers in kinds_of(cluster).items()}
    if strange := [name for name in counts if any(sign in name for sign in "+*,: ")]:
        raise SearchError(f"available_servers: {strange[0]!r} cannot name servers in a node order; use no '+*,:' in it")
    return NodeOrder.of(counts)
