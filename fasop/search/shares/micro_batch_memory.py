"""Which sizes of micro-batches, and in how many streams, fit into the memory of a plan's GPUs: as they were seen to
train, or by prediction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING

from conf.visible import plural
from fasop.costs.hardware import NodeKind
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.simulation.predict import Prediction, planned, predict_plan
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.train_config import Precision

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment


def that_fit(experiment: Experiment, sizes: Sequence[int], streams: Sequence[int]) -> list[dict[int, list[int]]]:
    """Choose for each replica the micro-batch size of the plan and those of `sizes` that fit, each with the numbers of
    streams that fit with it, which are the plan's or in `streams`.

    Of a model of which profiles have whole steps alone, imported from IIDP or JABAS, those fit that were measured, and
    smaller ones. Of a model that was not profiled all do.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: one of `sizes` or `streams` fits no replica.
    """
    parallel = experiment.parallel
    own, counts = parallel.micro_batch_size, [sorted({one, *streams}) for one in parallel.streams_of]
    try:
        placed = planned(experiment)
    except SearchError:
        found, how = list(_by_whole_steps(experiment, (own, *sizes), counts)), "profile"
    else:
        ranks = experiment.ranks_per_node()
        found = that_fit_on(placed, ranks, sizes, streams)
        how = "prediction" if None in rooms_of_replicas(placed, ranks) else "profile"
    for size in sizes:
        if not any(size in of_replica for of_replica in found):
            raise SearchError(
                f"adapt.micro_batch_sizes={list(sizes)}: micro-batches of {plural(size, 'sample')} do not fit in the "
                f"memory of any replica, by {how}; leave {size} out, or use parallel.recompute=full"
            )
    for count in streams:
        if not any(count in of_size for of_replica in found for of_size in of_replica.values()):
            raise SearchError(
                f"adapt.streams={list(streams)}: no replica has the memory for {plural(count, 'stream')}, by {how}; "
                f"leave {count} out, or use a smaller parallel.micro_batch_size"
            )
    return found


def that_fit_on(
    placed: PlacedTraining, ranks_per_node: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
) -> list[dict[int, list[int]]]:
    """The same on nodes where `sizes` and `streams` need not fit any replica."""
    parallel = placed.training.parallel
    own, counts = parallel.micro_batch_size, [sorted({one, *streams}) for one in parallel.streams_of]
    rooms = rooms_of_replicas(placed, ranks_per_node)
    predicted = cache(partial(_is_predicted_to_fit, placed))

    def has_room(room: int | None, node: NodeKind, way: tuple[int, int]) -> bool:
        size, count = way
        most = _most_streams(placed, node, size) if count > 1 else None
        if most is not None:
            return count <= most
        if room is not None and (count == 1 or size > room):
            return size <= room
        return predicted(size, count)

    found = list[dict[int, list[int]]]()
    for room, node, given, of_replica in zip(
        rooms, _nodes(placed, ranks_per_node), parallel.streams_of, counts, strict=False
    ):
        ways = [(size, count) for size in (own, *sizes) for count in of_replica]
        fitting = [way for way in ways if way == (own, given) or has_room(room, node, way)]
        found.append({size: [count for one, count in fitting if one == size] for size, _ in fitting})
    return found


def _nodes(placed: PlacedTraining, ranks_per_node: Sequence[int]) -> list[NodeKind]:
    """List the node of each rank; with whole replicas on single ranks, that of each replica."""
    return [node for node, ranks in zip(placed.nodes, ranks_per_node, strict=True) for _ in range(ranks)]


def _most_streams(placed: PlacedTraining, node: NodeKind, size: int) -> int | None:
    """That a GPU of the node was seen to have room for; None: not measured."""
    if node.profile is None:
        return None
    training = placed.training
    return _measured_streams(node.profile, node.profile.names(training.model), training.precision).get(size)


def _measured_streams(profile: LayerProfile, models: Collection[str], precision: Precision) -> dict[int, int]:
    """Map each micro-batch size to the streams that were measured on the host with least room."""
    found: dict[int, int] = {}
    for steps in profile.steps:
        if steps.model in models and steps.times and steps.precision in (None, precision):
            most = steps.most_workers or steps.times[-1].workers
            found[steps.micro_batch_size] = min(most, found.get(steps.micro_batch_size, most))
    return found


def _by_whole_steps(
    experiment: Experiment, sizes: Sequence[int], counts: Sequence[Sequence[int]]
) -> Iterator[dict[int, list[int]]]:
    """Yield for each replica the sizes that fit; a size that was not measured has the room of the next larger one that
    was."""
    parallel, cluster, model = experiment.parallel, experiment.cluster, experiment.model.name
    if parallel.world_size != parallel.layout.replicas[0]:
        yield from ({size: [*of_replica] for size in sizes} for of_replica in counts)
        return
    names = [
        name
        for name, ranks in zip(experiment.node_order.groups, experiment.ranks_per_node(), strict=True)
        for _ in range(ranks)
    ]
    rooms: dict[str, dict[int, int]] = {}
    for name in {*names}:
        file = cluster.gpus[cluster.groups[name].gpu].profile
        rooms[name] = {} if file is None else _measured_streams(read_profile(file), [model], experiment.train.precision)
    for name, given, of_replica in zip(names, parallel.streams_of, counts, strict=True):
        room = rooms[name]
        fitting = dict[int, list[int]]()
        for size in sizes:
            larger = min((one for one in room if one >= size), default=None)
            most = inf if not room else 0 if larger is None else room[larger]
            planned_one = given if size == parallel.micro_batch_size else None
            fitting[size] = [count for count in of_replica if count <= most or count == planned_one]
        yield {size: some for size, some in fitting.items() if some}


def rooms_of_replicas(placed: PlacedTraining, ranks_per_node: Sequence[int]) -> list[int | None]:
    """The largest micro-batch that each replica's GPU was seen to train the whole model with; None: not known."""
    training, parallel = placed.training, placed.training.parallel
    replicas = parallel.layout.replicas[0]
    if parallel.world_size != replicas or parallel.recompute is not Recompute.none:
        return [None] * replicas
    profiles = [node.profile for node in _nodes(placed, ranks_per_node)]
    return [None if one is None else one.room_for(training.model, training.precision) for one in profiles]


def fits(predicted: Prediction) -> bool:
    """Whether all stages do."""
    return all(stage.memory_gib <= stage.limit_gib for stage in predicted.stages)


def _is_predicted_to_fit(placed: PlacedTraining, size: int, streams: int) -> bool:
    """With as many micro-batches as there are, or one for each of several streams."""
    parallel = placed.training.parallel
    if streams == 1:
        batch = parallel.global_batch_size // parallel.micro_batch_size * size
        larger = replace(parallel, micro_batch_size=size, global_batch_size=batch, streams=None)
    else:
        replicas = parallel.first_replicas
        batch, of_each = size * streams * replicas, (streams,) * replicas
        larger = replace(parallel, micro_batch_size=size, global_batch_size=batch, streams=of_each, shares=None)
    training = replace(placed.training, parallel=larger, in_streams=streams > 1)
    try:
        return fits(predict_plan(replace(placed, training=training)))
    except SearchError:
        return True
