"""The best local batch size, shares, workers and accumulation for a global batch, of all that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf

import numpy as np

from conf.schema.values.partition import run_length_text
from conf.visible import plural
from fasop.errors import SearchError
from fasop.partition.exact_shares import Units, least_time
from fasop.shares.performance import Pace, WeightSync, paces
from fasop.shares.public_files import Cluster, Server

MOST_WORK = 1 << 34
"""Micro-batches in all times those of a GPU: to share them out takes some ten seconds."""
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
        """Count the micro-batches of one GPU in an iteration."""
        return self.workers * (self.accumulation + 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The words of a run, and the seconds of an iteration of it."""

    seconds: float
    words: list[str]


@dataclass(frozen=True)
class Solution:
    """Shares that no others beat, by the performance model."""

    global_batch_size: int
    local_batch_size: int
    sync: WeightSync
    seconds: float
    """Seconds of an iteration."""
    shares: tuple[UnitShare, ...]
    """The share of each unit, in the order of the servers."""

    @property
    def micro_batches(self) -> int:
        """Count the micro-batches of all GPUs."""
        return self.global_batch_size // self.local_batch_size

    def line(self) -> str:
        """Write the solution as IIDP's solver prints it."""
        units = [
            f"{share.server.name}:{share.gpus}GPU,VSW:{share.workers},GA:{share.accumulation}" for share in self.shares
        ]
        return (
            f"Solution - GBS: {self.global_batch_size} | LBS: {self.local_batch_size} | "
            f"weight sync method: {self.sync} | config: {units}"
        )

    def runs(self, cluster: Cluster) -> list[Run]:
        """Those with these shares, and what their iterations take: with the solution's workers, if a GPU has several;
        and with one micro-batch after another, as the solution is only where no GPU has several workers.

        Several workers of a run are its streams, whose gradients are added up before any weight is updated.
        """
        in_turn = Run(seconds=self._seconds(cluster, self.sync, in_turn=True), words=self._words(self.sync))
        if max(share.workers for share in self.shares) == 1:
            return [in_turn]
        of_replicas = [share.workers for share in self.shares for _ in range(share.gpus)]
        seconds = self._seconds(cluster, WeightSync.sequential, in_turn=False)
        streams = f"parallel.streams={run_length_text(of_replicas, '-')}"
        return [Run(seconds=seconds, words=[*self._words(WeightSync.sequential), streams]), in_turn]

    def _seconds(self, cluster: Cluster, sync: WeightSync, in_turn: bool) -> float:
        """Return the seconds of an iteration by the performance model."""
        longest = 0.0
        for share in self.shares:
            by_workers = paces(cluster, share.server, self.local_batch_size, sync)
            workers = 1 if in_turn else share.workers
            longest = max(longest, by_workers[workers - 1].seconds(share.micro_batches // workers - 1))
        return longest

    def _words(self, sync: WeightSync) -> list[str]:
        """List the words of a run whose replicas take these shares and update their weights in this way."""
        of_replicas = [share.micro_batches for share in self.shares for _ in range(share.gpus)]
        shares = [f"parallel.shares={run_length_text(of_replicas, '-')}"] if len({*of_replicas}) > 1 else []
        overlap = ["train.overlap_optimizer=true", "train.clip_grad=0"]
        return [
            f"parallel.data={len(of_replicas)}",
            f"parallel.micro_batch_size={self.local_batch_size}",
            f"parallel.global_batch_size={self.global_batch_size}",
            *shares,
            *(overlap if sync is WeightSync.overlap else ["train.overlap_optimizer=false"]),
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
    found: Solution | None = None
    for size in reversed(sizes):  # large ones are fast, and leave little to look at of the others
        at_most = inf if found is None else found.seconds
        solution = _of_size(cluster, global_batch_size, sync, size, unit, most_workers, at_most)
        if solution is not None and (found is None or _rank(solution) < _rank(found)):
            found = solution
    if found is None:
        raise SearchError(_none(cluster, global_batch_size, sizes, unit))
    return found


def _rank(solution: Solution) -> tuple[float, int]:
    return solution.seconds, sum(share.workers * share.gpus for share in solution.shares)


def _of_size(
    cluster: Cluster,
    batch: int,
    sync: WeightSync,
    size: int,
    unit: int,
    most_workers: int | None,
    at_most: float,
) -> Solution | None:
    """With a local batch size; None where nothing takes `at_most` seconds or less."""
    if batch % (size * unit):
        return None
    total = batch // (size * unit)
    kinds: dict[tuple[Pace, ...], list[int]] = {}  # numbers of servers that are alike
    known: dict[Server, tuple[Pace, ...]] = {}
    for number, server in enumerate(cluster.servers):
        nameless = replace(server, name="", gpus=0)
        if nameless not in known:
            known[nameless] = tuple(paces(cluster, server, size, sync)[:most_workers])
        kinds.setdefault(known[nameless], []).append(number)
    counts = [sum(cluster.servers[number].gpus // unit for number in numbers) for numbers in kinds.values()]
    most = [_most_within(by_workers, total, at_most) for by_workers in kinds]
    if sum(count * number for count, number in zip(counts, most, strict=True)) < total:
        return None
    require_solvable(batch, size * unit, max(most), total)
    units = [
        Units(count, seconds_by_number(by_workers, number))
        for count, by_workers, number in zip(counts, kinds, most, strict=True)
    ]
    found = least_time(units, total, at_most)
    if found is None:
        return None
    shares: dict[int, list[UnitShare]] = {}
    for (by_workers, numbers), of_units in zip(kinds.items(), found.numbers, strict=True):
        each = iter(of_units)
        for number in numbers:
            server = cluster.servers[number]
            shares[number] = [_share(server, unit, by_workers, next(each)) for _ in range(server.gpus // unit)]
    return Solution(
        global_batch_size=batch,
        local_batch_size=size,
        sync=sync,
        seconds=found.seconds,
        shares=tuple(share for number in range(len(cluster.servers)) for share in shares[number]),
    )


def _most_within(by_workers: Sequence[Pace], total: int, seconds: float) -> int:
    """No GPU takes more micro-batches than this in these seconds, nor more than the total."""
    if seconds == inf or any(pace.more_s <= 0 for pace in by_workers):
        return total
    passes = [int((seconds - pace.first_s) / pace.more_s) + 2 if seconds >= pace.first_s else 0 for pace in by_workers]
    return min(total, max(number * workers for workers, number in enumerate(passes, 1)))


def require_solvable(batch: int, samples: int, most: int, total: int) -> None:
    """Raises SearchError where sharing out `total` micro-batches, a GPU up to `most` of them, would take minutes."""
    if most * total > MOST_WORK:
        raise SearchError(
            f"parallel.global_batch_size={batch} is {total} micro-batches of {plural(samples, 'sample')}, up to {most} "
            "per GPU; sharing out so many would take too long: give a smaller batch, or a larger "
            "parallel.micro_batch_size"
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
        f"parallel.global_batch_size={batch} must give each of {plural(gpus, 'GPU')} a whole number of micro-batches "
        f"of {_either(sizes)} samples, the same for {unit} GPUs each; {_either(sorted(fits))} would"
    )


def _multiples(batch: int, sizes: Sequence[int], unit: int, gpus: int) -> Iterator[int]:
    for size in sizes:
        step, least = size * unit, size * gpus
        for near in (batch // step * step, -(-batch // step) * step):
            yield max(near, least)


def _either(values: Sequence[int]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])] if len(values) > 1 else [str(values[0])])
