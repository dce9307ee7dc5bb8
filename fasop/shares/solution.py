"""The best local batch size, shares, workers and accumulation for a global batch, of all that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from fasop.errors import SearchError
from fasop.partition.exact_shares import Units, least_time
from fasop.shares.performance import Pace, WeightSync, paces
from fasop.shares.public_files import Cluster, Server

NEAREST = 2
"""Batches that a message proposes."""


@dataclass(frozen=True)
class UnitShare:
    """What every GPU of a unit does: its workers, its passes of accumulation before the last, and the seconds."""

    server: Server
    gpus: int
    workers: int
    accumulation: int
    seconds: float

    @property
    def micro_batches(self) -> int:
        """Of one GPU, in an iteration."""
        return self.workers * (self.accumulation + 1)


@dataclass(frozen=True)
class Solution:
    """Shares that no others beat, by the performance model."""

    global_batch_size: int
    local_batch_size: int
    sync: WeightSync
    seconds: float
    """Of an iteration."""
    shares: tuple[UnitShare, ...]
    """By unit, in the order of the servers."""

    @property
    def micro_batches(self) -> int:
        """Of all GPUs."""
        return self.global_batch_size // self.local_batch_size

    def line(self) -> str:
        """As IIDP's solver prints it."""
        units = [
            f"{share.server.name}:{share.gpus}GPU,VSW:{share.workers},GA:{share.accumulation}" for share in self.shares
        ]
        return (
            f"Solution - GBS: {self.global_batch_size} | LBS: {self.local_batch_size} | "
            f"weight sync method: {self.sync} | config: {units}"
        )

    def words(self) -> list[str]:
        """Of a run whose replicas take these shares, and update their weights in this way."""
        groups = list[tuple[int, int]]()
        for share in self.shares:
            if groups and groups[-1][0] == share.micro_batches:
                groups[-1] = (share.micro_batches, groups[-1][1] + share.gpus)
            else:
                groups.append((share.micro_batches, share.gpus))
        shares = "-".join(f"{number}*{count}" if count > 1 else f"{number}" for number, count in groups)
        return [
            f"parallel.data={sum(share.gpus for share in self.shares)}",
            f"parallel.micro_batch_size={self.local_batch_size}",
            f"parallel.global_batch_size={self.global_batch_size}",
            *([f"parallel.shares={shares}"] if len(groups) > 1 else []),
            *(
                ["train.overlap_optimizer=true", "train.clip_grad=0"]
                if self.sync is WeightSync.overlap
                else ["train.overlap_optimizer=false"]
            ),
        ]


def best(
    cluster: Cluster,
    global_batch_size: int,
    sync: WeightSync,
    local_batch_size: int | None = None,
    unit: int | None = None,
    most_workers: int | None = None,
) -> Solution:
    """The solution that takes least, over all local batch sizes or with a given one.

    No GPU has more than `most_workers`, nor more than its memory has room for. Of equal times the one with fewer
    workers counts, then the larger local batch size.

    Raises:
        SearchError: no local batch size divides the batch into what all units can take, or a unit does not fit.
    """
    unit = unit or cluster.unit or gcd(*(server.gpus for server in cluster.servers))
    check_unit(cluster.servers, unit)
    sizes = sizes_of(cluster, local_batch_size)
    found = [
        solution
        for size in sizes
        if (solution := _of_size(cluster, global_batch_size, sync, size, unit, most_workers)) is not None
    ]
    if not found:
        raise SearchError(_none(cluster, global_batch_size, sizes, unit))
    return min(
        found,
        key=lambda one: (one.seconds, sum(share.workers * share.gpus for share in one.shares), -one.local_batch_size),
    )


def _of_size(
    cluster: Cluster, batch: int, sync: WeightSync, size: int, unit: int, most_workers: int | None
) -> Solution | None:
    if batch % (size * unit):
        return None
    total = batch // (size * unit)
    by_server = [paces(cluster, server, size, sync)[:most_workers] for server in cluster.servers]
    kinds = list[list[int]]()  # numbers of servers that are alike
    for number, of in enumerate(by_server):
        alike = next((kind for kind in kinds if by_server[kind[0]] == of), None)
        if alike is None:
            kinds.append([number])
        else:
            alike.append(number)
    units = [
        Units(
            sum(cluster.servers[number].gpus // unit for number in kind), seconds_by_number(by_server[kind[0]], total)
        )
        for kind in kinds
    ]
    found = least_time(units, total)
    if found is None:
        return None
    shares: dict[int, list[UnitShare]] = {}
    for kind, numbers in zip(kinds, found.numbers, strict=True):
        each = iter(numbers)
        for number in kind:
            server = cluster.servers[number]
            shares[number] = [_share(server, unit, by_server[number], next(each)) for _ in range(server.gpus // unit)]
    return Solution(
        global_batch_size=batch,
        local_batch_size=size,
        sync=sync,
        seconds=found.seconds,
        shares=tuple(share for number in range(len(by_server)) for share in shares[number]),
    )


def seconds_by_number(by_workers: Sequence[Pace], total: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The least time in which a GPU takes 0, 1, … micro-batches."""
    seconds = np.full(total + 1, np.inf)
    for workers, pace in enumerate(by_workers, 1):
        passes = np.arange(total // workers)
        seconds[workers::workers][: len(passes)] = np.minimum(
            seconds[workers::workers][: len(passes)], pace.first_s + passes * pace.more_s
        )
    return seconds


def _share(server: Server, unit: int, by_workers: Sequence[Pace], number: int) -> UnitShare:
    ways = [
        (pace.seconds(number // workers - 1), workers)
        for workers, pace in enumerate(by_workers, 1)
        if number % workers == 0
    ]
    seconds, workers = min(ways)
    return UnitShare(server, unit, workers, number // workers - 1, seconds)


def check_unit(servers: Sequence[Server], unit: int) -> None:
    for server in servers:
        if server.gpus % unit:
            fits = [str(size) for size in range(1, server.gpus + 1) if server.gpus % size == 0]
            raise SearchError(
                f"a unit of {unit} GPUs must divide the GPUs of every server; {server.name} has {server.gpus}: "
                f"{', '.join(fits)} would"
            )


def sizes_of(cluster: Cluster, given: int | None) -> list[int]:
    if given is not None and given not in cluster.measured:
        raise SearchError(
            f"parallel.micro_batch_size={given} was not measured on all GPUs; "
            f"{', '.join(map(str, sorted(cluster.measured)))} were"
        )
    return sorted(cluster.measured) if given is None else [given]


def _none(cluster: Cluster, batch: int, sizes: Sequence[int], unit: int) -> str:
    gpus = sum(server.gpus for server in cluster.servers)
    fits = sorted({*_multiples(batch, sizes, unit, gpus)}, key=lambda value: (abs(value - batch), value))[:NEAREST]
    return (
        f"parallel.global_batch_size={batch} must be a whole number of micro-batches of {_either(sizes)} samples for "
        f"each of {gpus} GPUs, the same for {unit} GPUs each; {_either(sorted(fits))} would be"
    )


def _multiples(batch: int, sizes: Sequence[int], unit: int, gpus: int) -> Iterator[int]:
    for size in sizes:
        step, least = size * unit, size * gpus
        for near in (batch // step * step, -(-batch // step) * step):
            yield max(near, least)


def _either(values: Sequence[int]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])] if len(values) > 1 else [str(values[0])])
