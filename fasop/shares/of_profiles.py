"""A run on GPUs of which whole steps were measured by IIDP or JABAS: its cluster, for their performance model.

A GPU has one worker unless streams are to be chosen, too; the engine then steps once all gradients are summed, so that
weights are handed out `sequential`ly. A profile without all-reduces has the times of the cluster's own links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from conf.schema.values.partition import run_length_text
from fasop.costs.arrays import Floats
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import Steps
from fasop.errors import SearchError
from fasop.partition.exact_shares import Units, least_time
from fasop.shares.performance import BYTES_BY_IIDP, Pace, WeightSync, paces
from fasop.shares.public_files import Cluster, MeasuredGpu, Server, step_of
from fasop.shares.solution import best, require_solvable

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment

SYNC = WeightSync.sequential
RING = 2
"""Bytes that cross a link for each byte that n ranks sum in a ring, times (n - 1) / n."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The micro-batch size and the micro-batches of each replica that take least for a batch."""

    size: int
    counts: tuple[int, ...]
    seconds: float
    """Seconds of an iteration."""
    streams: tuple[int, ...]
    """Streams of each replica."""
    sizes: tuple[int, ...]
    """Micro-batch sizes that were compared."""
    even: tuple[float, int] | None
    """Seconds with equal shares, and the micro-batch size that is then best."""


def measured_cluster(
    experiment: Experiment, in_streams: bool = False, read: Callable[[str], LayerProfile] = read_profile
) -> Cluster | None:
    """The nodes of a run, as IIDP describes servers; None unless steps of its model are all that profiles have of it.

    With `in_streams` each GPU can have as many workers as were measured. `read` gives the profile of a name.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: profiles have no micro-batch size in common, or no bucket sizes of the model.
    """
    cluster, parallel, model = experiment.cluster, experiment.parallel, experiment.model.name
    order = experiment.node_order.groups
    keys = [*dict.fromkeys(cluster.groups[name].gpu for name in order)]
    profiles: dict[str, LayerProfile] = {}
    for key in keys:
        name = cluster.gpus[key].profile
        profile = None if name is None else read(name)
        if profile is None or profile.costs or not any(steps.model == model for steps in profile.steps):
            return None
        profiles[key] = profile
    if parallel.world_size != parallel.layout.replicas[0]:
        raise SearchError(
            f"{parallel.sizes}: profiles of {' and '.join(one.gpu for one in profiles.values())} have whole steps of "
            f"model={model}, imported from IIDP or JABAS, without times of its parts; use parallel.tensor=1 "
            "parallel.pipeline=1, or profiles of 'tdpp profile'"
        )
    of_gpus = {key: _by_size(profile, model, in_streams) for key, profile in profiles.items()}
    common = set.intersection(*(set(sizes) for sizes in of_gpus.values()))
    if not common:
        raise SearchError(
            f"profiles of {' and '.join(one.gpu for one in profiles.values())} have steps of model={model} with no "
            "local batch size in common; measure one on all"
        )
    first = profiles[keys[0]]
    if model not in first.buckets_mib:
        raise SearchError(f"profile {cluster.gpus[keys[0]].profile!r} has no buckets_mib of model={model}")
    servers = [
        Server(
            name=f"{name}-{number}",
            gpu=cluster.groups[name].gpu,
            gpus=gpus,
            bandwidth_within=cluster.groups[name].intra_gbit_per_s * 1e9 / 8,
            bandwidth_between=cluster.groups[name].inter_gbit_per_s * 1e9 / 8,
            measured_as=cluster.groups[name].gpu,
        )
        for number, (name, gpus) in enumerate(zip(order, experiment.ranks_per_node(), strict=True))
    ]
    latency = {
        "within": max(cluster.groups[name].intra_latency_us for name in order),
        "between": max(cluster.groups[name].inter_latency_us for name in order),
    }
    return Cluster(
        servers=tuple(servers),
        measured={size: {key: of_gpus[key][size] for key in keys} for size in sorted(common)},
        buckets_mib=tuple(first.buckets_mib[model]),
        all_reduces_within=_all_reduces(first, "within", latency["within"], parallel.world_size),
        all_reduces_between=_all_reduces(first, "between", latency["between"], parallel.world_size),
        unit=1,
        smallest_batch=None,
    )


def solved(
    cluster: Cluster,
    batch: int,
    size: int | None,
    shares: Sequence[int] | None,
    in_streams: bool = False,
    streams_of: Sequence[int] | None = None,
) -> Solved:
    """What takes least, with this micro-batch size if one is given, and with these shares (in proportion) if some are.

    Args:
        in_streams: a replica may have as many workers as its GPU, not one alone.
        streams_of: the workers of each replica, where they are given.

    Raises:
        SearchError: nothing that was measured divides the batch so, or says anything of so many workers.
    """
    sizes = [*cluster.measured] if size is None else [size]
    equal = [1] * sum(server.gpus for server in cluster.servers)
    if streams_of is not None:
        return _with_streams(cluster, batch, sizes, shares, streams_of)
    alike = {one: _taken(cluster, batch, one, equal, in_streams) for one in sizes}
    even = [(way[0], one) for one, way in alike.items() if way is not None]
    if shares is not None:
        ways = {one: _taken(cluster, batch, one, shares, in_streams) for one in sizes}
        found = [(*way, one) for one, way in ways.items() if way is not None]
        if not found:
            raise SearchError(
                f"parallel.global_batch_size={batch} cannot be divided this way with any measured local batch size: "
                f"{', '.join(map(str, sizes))}"
            )
        seconds, streams, chosen = min(found)
        of_each = batch // chosen // sum(shares)
        counts, compared = [of_each * share for share in shares], [one for *_, one in found]
    else:
        solution = best(cluster, batch, SYNC, size, most_workers=None if in_streams else 1)
        seconds, chosen = solution.seconds, solution.local_batch_size
        counts = [share.micro_batches for share in solution.shares]
        streams = tuple(share.workers for share in solution.shares)
        compared = [one for one in sizes if batch % one == 0 and batch // one >= len(counts)]
    return Solved(
        size=chosen,
        counts=tuple(counts),
        seconds=seconds,
        streams=streams,
        sizes=tuple(compared),
        even=min(even, default=None),
    )


def _with_streams(
    cluster: Cluster, batch: int, sizes: Sequence[int], shares: Sequence[int] | None, streams_of: Sequence[int]
) -> Solved:
    """The same where each replica has a given number of workers, which divides its micro-batches. Raises SearchError:
    as `solved`."""
    servers = [server for server in cluster.servers for _ in range(server.gpus)]
    found, even = [], []
    for size in sizes:
        if size not in cluster.measured or batch % size:
            continue
        known = {server: paces(cluster, server, size, SYNC) for server in cluster.servers}
        if any(streams > len(known[server]) for server, streams in zip(servers, streams_of, strict=True)):
            continue
        kinds: dict[tuple[Pace, int], list[int]] = {}
        for number, (server, streams) in enumerate(zip(servers, streams_of, strict=True)):
            kinds.setdefault((known[server][streams - 1], streams), []).append(number)
        total = batch // size
        require_solvable(batch, size, total, total)
        tables = {key: _seconds_of_streams(*key, total) for key in kinds}
        of_replica = {number: tables[key] for key, numbers in kinds.items() for number in numbers}

        def longest(counts: Sequence[int], tables: Mapping[int, Floats] = of_replica) -> float:
            return max(float(tables[number][count]) for number, count in enumerate(counts))

        if total % len(servers) == 0:
            even.append((longest([total // len(servers)] * len(servers)), size))
        counts: dict[int, int] = {}
        if shares is None:
            least = least_time([Units(len(numbers), tables[key]) for key, numbers in kinds.items()], total)
            if least is not None:
                counts = dict(zip(chain(*kinds.values()), chain(*least.numbers), strict=True))
        elif total % sum(shares) == 0:
            counts = {number: total // sum(shares) * share for number, share in enumerate(shares)}
        ordered = tuple(counts[number] for number in sorted(counts))
        if ordered and longest(ordered) < math.inf:
            found.append((longest(ordered), size, ordered))
    if not found:
        most = {size: [len(paces(cluster, server, size, SYNC)) for server in cluster.servers] for size in sizes}
        rooms = ", ".join(
            f"{min(counts)} to {max(counts)} with micro-batches of {size}" for size, counts in most.items()
        )
        raise SearchError(
            f"parallel.streams={run_length_text(streams_of, '-')}: parallel.global_batch_size={batch} has no shares of "
            f"which each replica's are a multiple of its streams; the GPUs were measured with up to {rooms}"
        )
    seconds, size, ordered = min(found)
    return Solved(
        size=size,
        counts=ordered,
        seconds=seconds,
        streams=tuple(streams_of),
        sizes=tuple(size for _, size, _ in found),
        even=min((one for one in even if one[0] < math.inf), default=None),
    )


def _seconds_of_streams(pace: Pace, streams: int, total: int) -> Floats:
    """Return the seconds of 0 to `total` micro-batches; infinite where the streams do not divide them."""
    seconds = np.full(total + 1, np.inf)
    passes = np.arange(total // streams)
    seconds[streams::streams] = pace.first_s + passes * pace.more_s
    return seconds


def _taken(
    cluster: Cluster, batch: int, size: int, shares: Sequence[int], in_streams: bool
) -> tuple[float, tuple[int, ...]] | None:
    """Seconds of an iteration and the streams of each replica, if the batch can be shared out so."""
    if batch % (size * sum(shares)) or size not in cluster.measured:
        return None
    each, counts = batch // size // sum(shares), iter(shares)
    ways = []
    for server in cluster.servers:
        by_streams = paces(cluster, server, size, SYNC)[: None if in_streams else 1]
        for _ in range(server.gpus):
            count = each * next(counts)
            of_count = [
                (pace.seconds(count // streams - 1), streams)
                for streams, pace in enumerate(by_streams, 1)
                if count % streams == 0
            ]
            ways.append(min(of_count))
    return max(seconds for seconds, _ in ways), tuple(streams for _, streams in ways)


def _by_size(profile: LayerProfile, model: str, in_streams: bool) -> dict[int, MeasuredGpu]:
    """Map each micro-batch size to what was measured, of several hosts on the first one; with one worker, whatever
    memory has room for, or as many as were measured."""
    found: dict[int, MeasuredGpu] = {}
    for steps in profile.steps:
        if steps.model == model and steps.times and steps.times[0].workers == 1:
            found.setdefault(steps.micro_batch_size, _measured(profile.gpu, steps, in_streams))
    return found


def _measured(gpu: str, steps: Steps, in_streams: bool) -> MeasuredGpu:
    known = tuple(step_of(times.workers, times.ms) for times in steps.times)
    most = min(steps.most_workers or 1, steps.times[-1].workers) if in_streams else 1
    return MeasuredGpu(gpu, steps.micro_batch_size, most, known)


def _all_reduces(profile: LayerProfile, where: str, latency_us: float, ranks: int) -> tuple[tuple[float, float], ...]:
    """Ideal milliseconds by IIDP's formula, and real ones: as imported, or of a ring over the cluster's own links, by
    their bandwidth and each step's latency."""
    if where in profile.all_reduces:
        times = profile.all_reduces[where]
        return tuple(zip(times.ideal_ms, times.measured_ms, strict=True))
    latency_ms = 2 * (ranks - 1) * latency_us / 1000
    return (0.0, latency_ms), (1.0, RING / BYTES_BY_IIDP + latency_ms)
