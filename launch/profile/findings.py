"""What megatron_ext.profile measured on the ranks (docs/formats.md), merged into a profile for each type of GPU."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.blocks_of_module import digest_of
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment, Model, Precision
from fasop.costs.profiles.profile import (
    Cost,
    LayerProfile,
    Links,
    LinkTimes,
    ModelCosts,
    Module,
    ModuleBlock,
    SequenceBytes,
    Shape,
)
from fasop.costs.profiles.steps import CollectiveTimes, Host, Operation, Room, Steps, StepTimes
from launch.errors import LaunchError
from launch.profile.link_fit import all_reduce_times, p2p_times, rounded

Point = Mapping[str, Any]
WAYS = ("forward", "backward")
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """All that the ranks of a finished job wrote."""

    experiment: Experiment
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    """The key in cluster.gpus of each node's GPU, and the node's ranks."""
    ranks: Mapping[int, Mapping[str, Any]]
    groups: tuple[str, ...] = ()
    """The group of each node, by node rank."""

    def of(self, gpu: str) -> list[Mapping[str, Any]]:
        return [self.ranks[rank] for kind, ranks in self.nodes if kind == gpu for rank in ranks]

    @property
    def gpus(self) -> list[str]:
        return list(dict.fromkeys(gpu for gpu, _ in self.nodes))


def read_found(run: RunDir, experiment: Experiment) -> Found:
    """Raises LaunchError for a rank that has not written all."""
    found = _read(run, experiment)
    for rank, content in found.ranks.items():
        if not content.get("done"):
            raise LaunchError(f"{run.path}: rank {rank} ended without reporting what it measured")
    return found


def read_finished(run: RunDir, experiment: Experiment) -> Found | None:
    """What of an unfinished job all ranks that took part had finished; None if no GPU has the times of any size."""
    found = _read(run, experiment)
    for size in {
        (point["tensor"], point["micro_batch_size"]) for one in found.ranks.values() for point in one["points"]
    }:
        takes_part = sum(len(ranks) // size[0] * size[0] for _, ranks in found.nodes)
        alike = [one["points"] for one in found.ranks.values() if any(_is(point, size) for point in one["points"])]
        if len(alike) < takes_part:
            for points in alike:
                points[:] = [point for point in points if not _is(point, size)]
    fits = [any(point["too_large"] is None for one in found.of(gpu) for point in one["points"]) for gpu in found.gpus]
    return found if all(fits) else None


def _is(point: Point, size: tuple[int, int]) -> bool:
    return (point["tensor"], point["micro_batch_size"]) == size


def _read(run: RunDir, experiment: Experiment) -> Found:
    plan = run.read_plan()
    ranks: dict[int, dict[str, Any]] = {}
    for place in plan.ranks:
        ranks[place.rank] = {"points": [], **(run.read_json(run.profile_rank(place.rank)) or {})}
    groups = experiment.cluster.groups
    nodes = tuple((groups[node.group].gpu, tuple(node.ranks)) for node in plan.nodes)
    return Found(experiment=experiment, nodes=nodes, ranks=ranks, groups=tuple(node.group for node in plan.nodes))


def merged(found: Found, gpu: str, source: str, date: str) -> LayerProfile:
    """The profile of a type of GPU: medians over all its ranks.

    Raises:
        LaunchError: nothing fits into its memory.
        ConfigError: what was measured cannot be.
    """
    experiment, ranks = found.experiment, found.of(gpu)
    points: dict[tuple[int, int], list[Point]] = defaultdict(list)
    for rank in ranks:
        for point in rank.get("points", ()):
            points[point["tensor"], point["micro_batch_size"]].append(point)
    costs = [
        _costs(experiment, size, alike)
        for size, alike in sorted(points.items())
        if all(point["too_large"] is None for point in alike)
    ]
    if not costs:
        why = next(point["too_large"] for alike in points.values() for point in alike)
        raise LaunchError(
            f"model={experiment.model.name} does not fit in the memory of {gpu} at any of these sizes ({why}); try a "
            f"larger tensor_sizes=…, a smaller micro_batches=… or another model"
        )
    model, precision = experiment.model, experiment.train.precision
    of_module = model.measured
    rooms = [rank["room"] for rank in ranks if rank.get("room") is not None]
    gradients: Sequence[tuple[str, int]] = next((rank["gradients"] for rank in ranks if rank.get("gradients")), [])
    optimizer = [rank["optimizer_ns"][0] for rank in ranks if rank.get("optimizer_ns")]
    return LayerProfile(
        gpu=experiment.cluster.gpus[gpu].name,
        source=source,
        date=date,
        device=ranks[0]["device"],
        versions=dict(ranks[0]["versions"]),
        engine=experiment.engine.kind,
        engine_options=dict(experiment.engine.options),
        models={} if of_module else {model.name: Shape.of(model)},
        modules={model.name: _module(model, ranks[0]["module"])} if of_module else {},
        costs=costs,
        optimizer_ns_per_parameter={precision: rounded(statistics.median(optimizer))} if optimizer else {},
        within=_links(found, gpu, between=False),
        between=_links(found, gpu, between=True),
        collectives=_collectives(ranks),
        room=[Room(model=model.name, precision=precision, micro_batch_size=min(rooms))] if rooms else [],
        steps=_steps(ranks, model.name, precision),
        buckets_mib={model.name: buckets(gradients)} if gradients else {},
        hosts=_hosts(ranks, experiment.cluster.gpus[gpu].fp32_tflops),
    )


def buckets(gradients: Sequence[tuple[str, int]]) -> list[float]:
    """MiB of the buckets in which PyTorch sums gradients of 4 bytes that come in this order: the first one is full with
    1 MiB, so that sums begin early, every other one with 25."""
    found, size = list[float](), 0
    for number, (_, numel) in enumerate(gradients):
        size += 4 * numel
        if size >= (FIRST_BUCKET if not found else BUCKET) or number == len(gradients) - 1:
            found.append(rounded(size / 2**20))
            size = 0
    return found


def _hosts(ranks: Sequence[Mapping[str, Any]], tflops: float) -> dict[str, Host]:
    """Lists the hosts of which steps were measured; the ranks of one are its GPUs."""
    counts = Counter(rank["host"] for rank in ranks if rank.get("steps"))
    return {name: Host(gpus=count, tflops=tflops) for name, count in counts.items()}


def _steps(ranks: Sequence[Mapping[str, Any]], model: str, precision: Precision) -> list[Steps]:
    """Returns by host the medians over its ranks; of streams as many as all of them have room for."""
    by_place: dict[tuple[int, str], list[Sequence[Mapping[str, float]]]] = defaultdict(list)
    memory: dict[str, int] = {}
    for rank in ranks:
        for step in rank.get("steps") or ():
            by_place[step["micro_batch_size"], rank["host"]].append(step["times"])
            if rank.get("memory_bytes") is not None:
                memory[rank["host"]] = min(rank["memory_bytes"], memory.get(rank["host"], rank["memory_bytes"]))
    found = []
    for (size, host), alike in sorted(by_place.items()):
        times = [_step_times(of_count) for of_count in zip(*alike, strict=False)]
        if times:
            found.append(
                Steps(
                    model=model,
                    precision=precision,
                    host=host,
                    micro_batch_size=size,
                    most_workers=times[-1].workers,
                    memory_bytes=memory.get(host),
                    times=times,
                )
            )
    return found


def _step_times(ranks: Sequence[Mapping[str, float]]) -> StepTimes:
    parts = {part: statistics.median(rank[part] for rank in ranks) for part in (*WAYS, "update", "copy")}
    every = {"total": sum(parts.values()), "data": 0.0, **parts}
    return StepTimes(workers=int(ranks[0]["streams"]), **{part: rounded(ms) for part, ms in every.items()})


def too_large(found: Found, gpu: str) -> list[str]:
    """Sizes that were asked for and did not fit, in words."""
    every = {
        f"tensor {point['tensor']}, micro-batch {point['micro_batch_size']}"
        for rank in found.of(gpu)
        for point in rank.get("points", ())
        if point["too_large"] is not None
    }
    return sorted(every)


def short_of(found: Found, gpu: str) -> str | None:
    """Why no larger micro-batch has room for the whole model, as the rank with the least room says it; None if that was
    not tried, or none was too large."""
    tried = [rank for rank in found.of(gpu) if rank.get("room") is not None]
    return min(tried, key=lambda rank: rank["room"]).get("room_short_of") if tried else None


def unsettled(found: Found, gpu: str) -> list[str]:
    """Sizes whose times were not known well enough when their time was over, in words."""
    every: dict[str, float] = {}
    for rank in found.of(gpu):
        for point in rank.get("points", ()):
            if not point.get("known", True):
                name = f"tensor {point['tensor']}, micro-batch {point['micro_batch_size']}"
                every[name] = max(every.get(name, 0.0), point["disturbed"])
    return [f"{name} ({part:.0%} of it, disturbed by other processes)" for name, part in every.items()]


def _costs(experiment: Experiment, size: tuple[int, int], points: Sequence[Point]) -> ModelCosts:
    tensor, micro_batch_size = size
    peaks = [point["peak_bytes"] for point in points if point.get("peak_bytes") is not None]
    return ModelCosts.of(
        {kind: _cost([point["parts"][kind] for point in points]) for kind in points[0]["parts"]},
        model=experiment.model.name,
        tensor=tensor,
        micro_batch_size=micro_batch_size,
        precision=experiment.train.precision,
        sequence=_sequence(points),
        peak_bytes=max(peaks) if peaks else None,
        peak_layers=points[0].get("peak_layers") if peaks else None,
    )


def _module(model: Model, found: Mapping[str, Any]) -> Module:
    blocks = [ModuleBlock(**block) for block in found["blocks"]]
    digest = found["digest"] or digest_of(model)  # what ranks say of a file is of the one that they measured
    return Module(code=model.code_name, capture=model.capture, **{**found, "digest": digest, "blocks": blocks})


def _sequence(points: Sequence[Point]) -> SequenceBytes | None:
    """Returns the times of blocks that are measured one by one, the most of any rank."""
    every = [point["sequence"] for point in points if "sequence" in point]
    if not every:
        return None
    return SequenceBytes(
        **{key: [max(of) for of in zip(*(one[key] for one in every), strict=True)] for key in every[0]}
    )


def _cost(parts: Sequence[Mapping[str, float]]) -> Cost:
    times = {way: rounded(statistics.median(part[way] for part in parts)) for way in WAYS}
    spreads = {way: _spread([part[way] for part in parts], [part[f"{way}_spread"] for part in parts]) for way in WAYS}
    return Cost(
        forward=times["forward"],
        backward=times["backward"],
        forward_spread=spreads["forward"],
        backward_spread=spreads["backward"],
        activation_bytes=max(int(part["activation_bytes"]) for part in parts),
    )


def _spread(values: Sequence[float], spreads: Sequence[float]) -> float | None:
    """That of a rank, or what lies between the ranks, if that is more."""
    spread = max(statistics.median(spreads), (max(values) - min(values)) / 2)
    return rounded(spread) if math.isfinite(spread) else None


def _links(found: Found, gpu: str, between: bool) -> Links:
    return Links(p2p=_p2p(found, gpu, between), all_reduce=_all_reduce(found, gpu, between))


def _p2p(found: Found, gpu: str, between: bool) -> LinkTimes | None:
    """Returns the times between nodes of this type, or where there is one alone, from it to others."""
    node_of = {rank: node for node, (_, ranks) in enumerate(found.nodes) for rank in ranks}
    own: list[tuple[int, Mapping[str, float]]] = []
    mixed: list[tuple[int, Mapping[str, float]]] = []
    for rank, content in found.ranks.items():
        for link in content.get("p2p", ()):
            first, second = node_of[rank], node_of[link["to"]]
            kinds = {found.nodes[first][0], found.nodes[second][0]}
            if (first != second) == between and gpu in kinds:
                sharing = min(len(found.nodes[first][1]), len(found.nodes[second][1])) if between else 1
                (own if kinds == {gpu} else mixed).append((sharing, link["us_by_bytes"]))
    chosen = own or mixed
    if not chosen:
        return None
    sharing = max(number for number, _ in chosen)
    return p2p_times(medians([times for number, times in chosen if number == sharing]), sharing)


def _all_reduce(found: Found, gpu: str, between: bool) -> LinkTimes | None:
    alike = [one for rank in found.of(gpu) for one in rank.get("all_reduces", ()) if one["between"] == between]
    if not alike:
        return None
    ranks = max(one["ranks"] for one in alike)
    sharing = min(len(of_node) for _, of_node in found.nodes) if between else 1
    return all_reduce_times(medians([one["us_by_bytes"] for one in alike if one["ranks"] == ranks]), ranks, sharing)


def _collectives(ranks: Sequence[Mapping[str, Any]]) -> list[CollectiveTimes]:
    """Medians over the groups that measured alike."""
    alike: dict[tuple[str, int, int, int], list[Mapping[str, float]]] = defaultdict(list)
    for rank in ranks:
        for one in rank.get("collectives", ()):
            alike[one["operation"], one["ranks"], one["nodes"], one["sharing"]].append(one["us_by_bytes"])
    return [
        CollectiveTimes(
            operation=Operation(operation),
            ranks=count,
            nodes=nodes,
            sharing=sharing,
            us_by_bytes={size: rounded(us) for size, us in medians(times).items()},
        )
        for (operation, count, nodes, sharing), times in sorted(alike.items())
    ]


def medians(times: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Returns the medians of times, by size."""
    return {int(size): statistics.median(one[size] for one in times) for size in times[0]}
