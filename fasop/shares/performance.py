"""How long an iteration of IIDP takes on one GPU, by virtual workers and passes of accumulation.

The formulas are those of github.com/unist-ssl/IIDP (iidp/config/model), with their roundings, so that answers agree:
forward and backward passes of v workers run at g(v) times the rate of one, g(v) = a ln v + b fitted to what was
measured (where no more than two workers were, the measured rates themselves); an all-reduce takes p x + q, x being its
time at full bandwidth; all buckets but the last overlap with the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import inf, isfinite, log
from typing import NamedTuple

import numpy as np

from fasop.costs.arrays import Floats
from fasop.errors import SearchError
from fasop.shares.public_files import Cluster, MeasuredGpu, Server

MIB = 2**20
FITTED_FROM = 3
"""Workers that were measured at most, from which on rates are fitted."""
BYTES_BY_IIDP = 4
"""That cross a link for each byte that n ranks sum, times (n - 1) / n, by IIDP's formula; in a ring half as many do,
which the line through measured times makes up for."""
BUCKET_MIB = 25.0
"""PyTorch's capacity of a bucket."""
UNEVEN = 1.5
"""The mean size of buckets, over their capacity, from which on the optimizer had better wait for all of them."""
_OF_PACE = ("first_s", "more_s", "copy_s")


class WeightSync(StrEnum):
    """When the optimizer steps and hands the weights to the other workers: after all buckets, or bucket by bucket."""

    sequential = "sequential"
    overlap = "overlap"


@dataclass(frozen=True)
class Pace:
    """Seconds of an iteration: `first_s` with one pass, `more_s` for every pass of accumulation before it."""

    first_s: float
    more_s: float
    copy_s: float = 0.0
    """The part of `first_s` that each worker but the first adds by getting the weights."""

    def seconds(self, passes_before: int) -> float:
        return self.first_s + passes_before * self.more_s


class InRounds(NamedTuple):
    """Seconds of an iteration of one GPU."""

    whole: float
    passes: float
    """The part of these for the data and the passes of the micro-batches."""


def in_rounds(by_workers: Sequence[Pace], workers: int, *halves: int) -> InRounds:
    """With workers that take so many micro-batches in rounds, one half after the other. The last round of a half may
    have fewer micro-batches, beside which the other workers are idle."""
    passes, last = 0.0, workers
    for count in halves:
        full, left = divmod(count, workers)
        passes += full * by_workers[workers - 1].more_s + (by_workers[left - 1].more_s if left else 0.0)
        last = (left or workers) if count else last
    end = by_workers[last - 1]
    return InRounds(passes - end.more_s + end.first_s + (workers - last) * end.copy_s, passes)


def seconds_in_rounds(by_workers: Sequence[Pace], workers: int, most: int) -> Floats:
    """The same of 0, 1, … up to `most` micro-batches in one go; nobody takes 0."""
    first_s, more_s, copy_s = (np.array([getattr(pace, key) for pace in by_workers]) for key in _OF_PACE)
    counts = np.arange(1, most + 1)
    left = counts % workers
    last = np.where(left > 0, left, workers)
    full = (counts - last) // workers
    seconds = full * more_s[workers - 1] + first_s[last - 1] + (workers - last) * copy_s[last - 1]
    return np.concatenate([[np.inf], seconds])


def recommended(buckets_mib: Sequence[float]) -> WeightSync:
    """The public rule; a single bucket overlaps with nothing, and then the two are the same."""
    before = buckets_mib[:-1]
    if before and int(sum(before) / len(before)) / BUCKET_MIB > UNEVEN:
        return WeightSync.sequential
    return WeightSync.overlap


def paces(cluster: Cluster, server: Server, local_batch_size: int, sync: WeightSync) -> list[Pace]:
    """List the paces of one GPU of a server, by number of workers from 1 to the most that its memory has room for.

    Raises:
        SearchError: memory has room for more workers than the times say anything of, or the times give no throughput.
    """
    gpu = cluster.measured[local_batch_size][server.measured_as]
    rates = _rates(gpu)
    reduces = all_reduces(cluster, server)
    largest = gpu.steps[-1]
    forward = largest.forward_s / (largest.forward_s + largest.backward_s)
    copy_s = largest.copy_s / (largest.workers - 1) if largest.workers > 1 else 0.0
    share = cluster.buckets_mib[-1] / sum(cluster.buckets_mib) if sync is WeightSync.overlap else 1.0
    data = {step.workers: step.data_s for step in gpu.steps}
    found = []
    for workers, rate in enumerate(rates, 1):
        passes_s = round(local_batch_size * workers / rate, 4)
        forward_s, backward_s = passes_s * forward, passes_s * (1 - forward)
        data_s = data.get(workers, data[1] * workers)
        first_s = (
            data_s + largest.statistics_s * workers + forward_s + max(backward_s, sum(reduces[:-1])) + reduces[-1]
        ) + (largest.update_s + copy_s * (workers - 1)) * share
        found.append(Pace(first_s, data_s + forward_s + backward_s, copy_s * share))
    if not isfinite(found[-1].first_s):
        raise SearchError(
            f"{server.name}: an iteration with local batch size {local_batch_size} would take {found[-1].first_s} s; "
            f"are its bandwidth of {server.bandwidth_between:g} byte/s and the times of {gpu.gpu} right?"
        )
    return found


def _rates(gpu: MeasuredGpu) -> list[float]:
    """Samples a second of 1, 2, … workers."""
    passes_s = gpu.steps[0].forward_s + gpu.steps[0].backward_s
    one = round(gpu.local_batch_size / passes_s, 2)
    if not 0 < one < inf:
        raise SearchError(
            f"{gpu.gpu}, local batch size {gpu.local_batch_size}: forward and backward passes of {passes_s:g} s give a "
            f"throughput of {one} samples/s; measure again"
        )
    measured = [
        round(gpu.local_batch_size * step.workers / (step.forward_s + step.backward_s) / one, 3) for step in gpu.steps
    ]
    counts = [step.workers for step in gpu.steps]
    if counts[-1] < FITTED_FROM:
        if gpu.most_workers > counts[-1]:
            raise SearchError(
                f"{gpu.gpu}, local batch size {gpu.local_batch_size}: memory has room for {gpu.most_workers} workers, "
                f"but times reach only {counts[-1]}; measure {gpu.most_workers} of them"
            )
        relative = measured[: gpu.most_workers]
    else:
        slope, start = np.polyfit(np.log(counts), measured, 1)
        relative = [float(slope * log(workers) + start) for workers in range(1, gpu.most_workers + 1)]
    if min(relative) <= 0:
        raise SearchError(
            f"{gpu.gpu}, local batch size {gpu.local_batch_size}: {relative.index(min(relative)) + 1} workers would "
            f"have no throughput by the fitted line; measure again"
        )
    return [rate * one for rate in relative]


def all_reduces(cluster: Cluster, server: Server) -> list[float]:
    """Seconds of every bucket's."""
    gpus, alone = sum(one.gpus for one in cluster.servers), len(cluster.servers) == 1
    points = cluster.all_reduces_within if alone else cluster.all_reduces_between
    bandwidth = server.bandwidth_within if alone else server.bandwidth_between
    if not points:
        raise SearchError(
            f"all-reduces {'within' if alone else 'between'} servers were not measured: comm_profile_dir has no "
            f"{'intra' if alone else 'inter'}_comm_profile_data.txt"
        )
    slope, start = _line(points)
    return [
        float(slope * (size * MIB / gpus * BYTES_BY_IIDP * (gpus - 1) / bandwidth * 1000) + start) / 1000
        for size in cluster.buckets_mib
    ]


@lru_cache(maxsize=8)
def _line(points: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    """Slope and start of the line through ideal and measured times."""
    slope, start = np.polyfit([ideal for ideal, _ in points], [taken for _, taken in points], 1)
    return float(slope), float(start)
