"""All plans whose stages differ, of small clusters and models made from a seed: what a search is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from conf.schema.values.partition import Partition, Shares
from fasop.costs.hardware import NodeKind
from fasop.costs.training import PlacedTraining, Training
from fasop.search.space.choices import Choices
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.columns import ColumnReplay
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages
from megatron_ext.contract.parallel_config import Schedule
from tests.support.fasop.random_clusters import NETWORKS, random_case
from tests.support.fasop.random_pipelines import all_partitions

MOST = 60
"""Plans but for their partition that are tried in a case."""


def all_layouts(gpus: int, tensors: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Tensor sizes and replicas by stage, not all terms alike."""
    for cuts in product([False, True], repeat=gpus - 1):
        ends = [place + 1 for place, cut in enumerate(cuts) if cut]
        widths = np.diff([0, *ends, gpus]).tolist()
        for sizes in product(tensors, repeat=len(widths)):
            if all(width % size == 0 for width, size in zip(widths, sizes, strict=True)):
                stages = tuple((size, width // size) for width, size in zip(widths, sizes, strict=True))
                if len(set(stages)) > 1:
                    yield stages


def inside_nodes(stages: tuple[tuple[int, int], ...], nodes: list[NodeKind]) -> bool:
    of_gpu = [number for number, node in enumerate(nodes) for _ in range(node.gpus)]
    first = 0
    for tensor, replicas in stages:
        for _ in range(replicas):
            if len(set(of_gpu[first : first + tensor])) > 1:
                return False
            first += tensor
    return True


def every_plan(training: Training, kinds: list[NodeKind], choices: Choices) -> Iterator[PlacedTraining]:
    """But for its partition."""
    gpus, batch = sum(kind.gpus * kind.group.count for kind in kinds), training.parallel.global_batch_size
    tensors = [one for one in (1, 2, 3, 4) if training.model.heads % one == 0]
    orders = sorted({*permutations([n for n, kind in enumerate(kinds) for _ in range(kind.group.count)])})
    for stages, order in product(all_layouts(gpus, tensors), orders):
        nodes = [kinds[number] for number in order]
        most = max(replicas for _, replicas in stages)
        if len(stages) > training.blocks.most_stages or not inside_nodes(stages, nodes):
            continue
        for size in choices.micro_batch_size or ():
            count = batch // size
            if most > count:
                continue
            of_stages = [replicas for _, replicas in stages]
            even = len(set(of_stages)) == 1
            for schedule, recompute, sharded in product(
                choices.schedule, choices.recompute, choices.sharded_optimizer if most > 1 else (False,)
            ):
                parallel = replace(
                    training.parallel,
                    tensor=tuple(tensor for tensor, _ in stages),
                    data=most,
                    replicas=tuple(of_stages),
                    pipeline=len(stages),
                    micro_batch_size=size,
                    schedule=schedule,
                    recompute=recompute,
                    sharded_optimizer=sharded,
                    shares=Shares.even(count, most).numbers if even and count % most else None,
                    node_order=tuple(node.name for node in nodes),
                )
                one = replace(training, parallel=parallel)
                yield PlacedTraining(training=one, partition=Partition(()), nodes=nodes)


def replay_of(plan: PlacedTraining) -> ColumnReplay:
    parallel, layout = plan.training.parallel, plan.training.parallel.layout
    counts = parallel.micro_batches_of if layout.even else [parallel.global_batch_size // parallel.micro_batch_size]
    return ColumnReplay(layout, str(parallel.schedule), counts)


def fastest(plan: PlacedTraining) -> float:
    """Of all partitions that fit, seconds; infinite if none does."""
    parallel = plan.training.parallel
    table = all_partitions(plan.training.blocks.layers, parallel.layout.stages)
    seconds = replay_of(plan).seconds(HeterogeneousStages(plan).columns(table))
    for column in np.argsort(seconds).tolist():
        layers = tuple(table[:, column].tolist())
        whole = replace(parallel, partition=layers)
        placed = replace(plan, training=replace(plan.training, parallel=whole), partition=Partition(layers))
        predicted = predict_plan(placed)
        if all(stage.memory_gib <= stage.limit_gib for stage in predicted.stages):
            assert predicted.iteration_s == pytest.approx(seconds[column])
            return predicted.iteration_s
    return np.inf


def small_case(
    seed: int, *, alike: bool = True, network: str = "plain"
) -> tuple[Training, list[NodeKind], Choices, list[PlacedTraining]]:
    """Up to six GPUs and six layers, and a network of `random_clusters.NETWORKS`."""
    rng = np.random.default_rng(seed)
    while True:
        training, kinds, choices = random_case(rng, alike=alike)
        kinds = NETWORKS[network](rng, kinds)
        gpus = sum(kind.gpus * kind.group.count for kind in kinds)
        if not 3 <= gpus <= 6:
            continue
        batch = training.parallel.global_batch_size
        sizes = [one for one in range(1, batch + 1) if batch % one == 0]
        schedules = [one for one in choices.schedule if one is not Schedule.interleaved]
        only = replace(
            choices,
            micro_batch_size=(int(rng.choice(sizes[:3])),),
            schedule=tuple(schedules[:1] if gpus > 4 else schedules[:2]),
            recompute=choices.recompute[-1:],
            sharded_optimizer=choices.sharded_optimizer[-1:] if gpus > 4 else choices.sharded_optimizer,
        )
        plans = [*every_plan(training, kinds, only)] if schedules else []
        if 0 < len(plans) <= MOST:
            return training, kinds, only, plans
