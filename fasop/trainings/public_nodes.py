"""Servers that IIDP or JABAS profiled, with the exact division of every batch: local batch size, virtual workers and
passes of accumulation may change with it, as they do there; or the workers of each GPU stay as they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import gcd

from conf.errors import ConfigError
from conf.schema.values.partition import AUTO, NodeOrder, by_replica
from conf.visible import plural
from fasop.errors import SearchError
from fasop.partition.exact_shares import Units, least_time
from fasop.shares.performance import Pace, WeightSync, all_reduces, paces, seconds_in_rounds
from fasop.shares.public_files import Cluster, Server
from fasop.shares.solution import check_unit, seconds_by_number, sizes_of
from fasop.trainings.played import NodeSet, total
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.iteration import SampleDivision

Streams = Mapping[str, tuple[int, ...]]
"""Workers that stay as they are, by server, then by unit of its GPUs."""


class PublicNodes:
    """Some servers; a replica stands for so many GPUs that the rules' even numbers of micro-batches divide among
    units."""

    ways = None
    pipelined = False

    def __init__(
        self, cluster: Cluster, sync: WeightSync, sizes: Sequence[int], unit: int, streams: Streams | None = None
    ) -> None:
        """`sizes` are local batch sizes, of which the best is taken for each batch; `streams` None: so are workers."""
        self._cluster, self._sync, self._sizes, self._unit, self._streams = cluster, sync, sizes, unit, streams
        self._step = step(sizes, unit)
        self._known: dict[int, float] = {}
        gpus = sum(server.gpus for server in cluster.servers)
        self.weights = (1,) * max(1, gpus * min(sizes) // self._step)
        self.streams = (1,) * len(self.weights)
        self._sum_s = max(sum(all_reduces(cluster, server)) for server in cluster.servers)

    def seconds(self, division: SampleDivision, measures: bool = False) -> float:
        """Return the seconds with the best local batch size. A batch that cannot be divided, as the last one of a
        training may be, takes what the next larger one does. One that measures sums a second gradient."""
        of_unit = min(self._sizes) * self._unit
        batch = -(-sum(division.shares) * self._step // of_unit) * of_unit
        if batch not in self._known:
            self._known[batch] = min(self._of_size(batch, size) for size in self._sizes)
        return self._known[batch] + (self._sum_s if measures else 0.0)

    def times(self, division: SampleDivision, iterations: int, measures: bool) -> Times | None:
        return None

    def _of_size(self, batch: int, size: int) -> float:
        total, left = divmod(batch, size * self._unit)
        if left:
            return math.inf
        units = [
            Units(count, seconds_by_number(own, total) if v is None else seconds_in_rounds(own, v, total))
            for (own, v), count in self._kinds[size].items()
        ]
        found = least_time(units, total)
        return math.inf if found is None else found.seconds

    @cached_property
    def _kinds(self) -> dict[int, dict[tuple[tuple[Pace, ...], int | None], int]]:
        """Map each local batch size to the paces of units that are alike and their workers, if these stay, and how many
        units these are."""
        return {size: self._alike(size) for size in self._sizes}

    def _alike(self, size: int) -> dict[tuple[tuple[Pace, ...], int | None], int]:
        counts: dict[tuple[tuple[Pace, ...], int | None], int] = {}
        of_kind: dict[Server, tuple[Pace, ...]] = {}
        for server in self._cluster.servers:
            kind = replace(server, name="", gpus=1)
            if kind not in of_kind:
                of_kind[kind] = tuple(paces(self._cluster, server, size, self._sync))
            units = server.gpus // self._unit
            for workers in (None,) * units if self._streams is None else self._streams[server.name]:
                key = of_kind[kind], workers
                counts[key] = counts.get(key, 0) + 1
        return counts


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
    streams: Streams | None = None,
) -> list[NodeSet]:
    """Those of the orders, whose groups are named as `kinds_of` does; `prices` are by group, US dollars an hour. Raises
    SearchError: the local batch size was not measured, or a unit fits no server."""
    unit = unit_of(cluster, unit)
    sizes, kinds = sizes_with(cluster, size, streams), kinds_of(cluster, streams)
    found = []
    for order in orders:
        left = {name: iter(servers) for name, servers in kinds.items()}
        some = replace(cluster, servers=tuple(next(left[name]) for name in order.groups))
        found.append(
            NodeSet(
                name=str(order),
                gpus=sum(server.gpus for server in some.servers),
                price_per_hour=total([prices.get(name) for name in order.groups]),
                nodes=PublicNodes(some, sync, sizes, unit, streams),
            )
        )
    return found


def unit_of(cluster: Cluster, given: int | None) -> int:
    """GPUs that work alike, as given or as the configuration says, or the most that divide every server. Raises
    SearchError: they do not divide the GPUs of a server."""
    unit = given or cluster.unit or gcd(*(server.gpus for server in cluster.servers))
    check_unit(cluster.servers, unit)
    return unit


def streams_by_server(cluster: Cluster, text: str, unit: int) -> Streams | None:
    """`parallel.streams`: workers of each GPU in the order of the servers, or one number for all; None: those that are
    best for each batch. Raises SearchError: they are none, not those of all GPUs, or differ within a unit."""
    if text == AUTO:
        return None
    gpus = sum(server.gpus for server in cluster.servers)
    try:
        each = iter(by_replica(text, gpus))
    except ConfigError as error:
        raise SearchError(str(error)) from error
    found = {}
    for server in cluster.servers:
        own = [next(each) for _ in range(server.gpus)]
        units = [own[first : first + unit] for first in range(0, server.gpus, unit)]
        if any(len({*of_unit}) > 1 for of_unit in units):
            raise SearchError(
                f"parallel.streams={text}: {unit} GPUs of a server work alike (unit={unit}), but {server.name} gets "
                f"{'-'.join(map(str, own))}; give them the same number, or use a smaller unit"
            )
        found[server.name] = tuple(of_unit[0] for of_unit in units)
    return found


def sizes_with(cluster: Cluster, given: int | None, streams: Streams | None) -> list[int]:
    """Local batch sizes with which every GPU has room for its workers. Raises SearchError: the given one was not
    measured, or there are none."""
    sizes = sizes_of(cluster, given)
    if streams is None:
        return sizes
    short = {
        size: [
            (server, most)
            for server in cluster.servers
            if max(streams[server.name]) > (most := cluster.measured[size][server.measured_as].most_workers)
        ]
        for size in sizes
    }
    if not (fitting := [size for size, servers in short.items() if not servers]):
        size, ((server, most), *_) = next(iter(short.items()))
        raise SearchError(
            f"parallel.streams gives {plural(max(streams[server.name]), 'worker')} to a GPU of {server.name}, but with "
            f"micro-batches of {size} its memory has room for {most}; give it fewer"
        )
    return fitting


def kinds_of(cluster: Cluster, streams: Streams | None = None) -> dict[str, list[Server]]:
    """Servers with the same GPUs, links and workers, by the name of the first of them; their measured times may
    differ."""
    kinds: dict[tuple[Server, tuple[int, ...]], list[Server]] = {}
    for server in cluster.servers:
        workers = () if streams is None else streams[server.name]
        kinds.setdefault((replace(server, name="", measured_as=""), workers), []).append(server)
    return {servers[0].name: servers for servers in kinds.values()}


def whole_order(cluster: Cluster, streams: Streams | None = None) -> NodeOrder:
    """Return an order of all servers, by the names of their kinds. Raises SearchError: a server has a name that no node
    order can have."""
    counts = {name: len(servers) for name, servers in kinds_of(cluster, streams).items()}
    if strange := [name for name in counts if any(sign in name for sign in "+*,: ")]:
        raise SearchError(f"available_servers: {strange[0]!r} cannot name servers in a node order; use no '+*,:' in it")
    return NodeOrder.of(counts)
