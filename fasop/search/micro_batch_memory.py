"""Which sizes of micro-batches fit into the memory of a plan's GPUs: as they were seen to train, or by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conf.schema.experiment import Experiment
from conf.schema.parallel import Recompute
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.simulation.predict import Prediction, planned, predict_plan


def that_fit(experiment: Experiment, sizes: Sequence[int]) -> list[list[int]]:
    """Those of `sizes` that fit, by replica.

    Of a model whose memory is not known, for it was not profiled, all do.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: one fits no replica.
    """
    try:
        placed = planned(experiment)
    except SearchError:
        return [list(sizes)] * experiment.parallel.layout.replicas[0]
    rooms = rooms_of_replicas(placed, experiment.ranks_per_node())
    found = [[size for size in sizes if room is None or size <= room] for room in rooms]
    if None in rooms:
        predicted = [size for size in sizes if _is_predicted_to_fit(placed, size)]
        found = [predicted if room is None else seen for room, seen in zip(rooms, found, strict=True)]
    for size in sizes:
        if not any(size in of_replica for of_replica in found):
            raise SearchError(
                f"adapt.micro_batch_sizes={list(sizes)}: micro-batches of {size} samples fit the memory of no replica, "
                f"by {'prediction' if None in rooms else 'profile'}; leave {size} out, or use parallel.recompute=full"
            )
    return found


def rooms_of_replicas(placed: PlacedTraining, ranks_per_node: Sequence[int]) -> list[int | None]:
    """The largest micro-batch that each replica's GPU was seen to train the whole model with; None: not known."""
    training, parallel = placed.training, placed.training.parallel
    replicas = parallel.layout.replicas[0]
    if parallel.world_size != replicas or parallel.recompute is not Recompute.none:
        return [None] * replicas
    nodes = [node for node, ranks in zip(placed.nodes, ranks_per_node, strict=True) for _ in range(ranks)]
    profiles = [node.profile for node in nodes]
    return [None if one is None else one.room_for(training.model, training.precision) for one in profiles]


def fits(predicted: Prediction) -> bool:
    """Whether all stages do."""
    return all(stage.memory_gib <= stage.limit_gib for stage in predicted.stages)


def _is_predicted_to_fit(placed: PlacedTraining, size: int) -> bool:
    """With as many micro-batches as there are."""
    parallel = placed.training.parallel
    batch = parallel.global_batch_size // parallel.micro_batch_size * size
    larger = replace(parallel, micro_batch_size=size, global_batch_size=batch)
    try:
        return fits(predict_plan(replace(placed, training=replace(placed.training, parallel=larger))))
    except SearchError:
        return True
