"""Plans whose replicas lie on different kinds of nodes, against the replay of every plan by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from conf.schema.experiment import Schedule
from conf.schema.values.partition import Partition
from fasop.costs.hardware import Factors, NodeKind
from fasop.costs.training import PlacedTraining, Training
from fasop.search.bounds.gpu_classes import Way
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.closer_bounds import closer_least
from fasop.search.inputs import read
from fasop.search.proof import prove
from fasop.search.search import Best, Coverage, explore
from fasop.search.space.candidates import Space, sizes
from fasop.search.space.choices import Choices
from fasop.simulation.predict import Prediction, predict_plan
from tests.support.cases import fewer
from tests.support.fasop.random_clusters import random_case, with_links
from tests.support.fasop.random_pipelines import all_partitions

MOST = 300
"""Plans of a case that are replayed one by one."""
SHAPES = ((1, 1, 2), (2, 2), (1, 2, 3), (2, 1, 1), (1, 3), (3, 3), (2, 2, 2))
"""Nodes of each kind. Of three kinds, each replica can be the slowest one in another way."""


Case = tuple[Training, Sequence[NodeKind], Choices, bool]
"""And whether shares differ."""


@cache
def crossed_case(seed: int) -> Case:
    """Kinds of nodes with few GPUs, so that the replicas of a stage lie on several."""
    rng = np.random.default_rng(seed)
    while True:
        training, kinds, choices = random_case(rng, alike=rng.random() < 0.8)
        shape, gpus = SHAPES[rng.integers(len(SHAPES))], int(rng.choice([1, 1, 2]))
        if len(kinds) < len(shape):
            continue
        kinds = [
            replace(kind, gpus=gpus, group=replace(kind.group, count=count))
            for kind, count in zip(kinds, shape, strict=False)
        ]
        kinds = with_links(rng, kinds) if rng.random() < 0.2 else kinds
        uneven = bool(rng.random() < 0.3)
        choices = replace(choices, data=(2, 3) if uneven else (2, 3, 4))
        if 0 < len(plans := every_plan(training, kinds, choices, uneven=uneven)) <= MOST:
            assert all(len(plan.nodes) == sum(shape) for plan in plans)
            return training, kinds, choices, uneven


def every_plan(
    training: Training, kinds: Sequence[NodeKind], choices: Choices, *, uneven: bool
) -> list[PlacedTraining]:
    """All sizes, schedules, options, orders and partitions; none if there are too many."""
    nodes = [kind for kind in kinds for _ in range(kind.group.count)]
    orders = {tuple(kind.name for kind in order): order for order in itertools.permutations(nodes)}
    found = list[PlacedTraining]()
    for one in sizes(training, kinds, choices, uneven=uneven):
        for schedule, chunks in choices.ways:
            if not choices.runs(one.parallel, schedule, chunks, one.model, one.engine):
                continue
            variants = [*choices.variants(replace(one.parallel, schedule=schedule, chunks=chunks))]
            if math.comb(one.blocks.layers + one.parallel.pipeline * chunks - 1, one.blocks.layers) > MOST:
                return []
            table = all_partitions(one.blocks.layers, one.parallel.pipeline * chunks).T.tolist()
            if len(found) + len(variants) * len(orders) * len(table) > MOST:
                return []
            for variant, (names, order), layers in itertools.product(variants, orders.items(), table):
                partition = Partition(tuple(layers))
                parallel = replace(variant, partition=partition.layers, node_order=names)
                found.append(PlacedTraining(training=replace(one, parallel=parallel), partition=partition, nodes=order))
    return found


Replayed = list[tuple[PlacedTraining, Prediction]]
"""Every plan of a case, predicted by itself."""


def replay(case: Case) -> Replayed:
    training, kinds, choices, uneven = case
    return [(plan, predict_plan(plan)) for plan in every_plan(training, kinds, choices, uneven=uneven)]


@cache
def replayed(seed: int) -> Replayed:
    return replay(crossed_case(seed))


def best_of(plans: Replayed) -> float:
    """Seconds; infinite where none fits."""
    return min(
        (
            predicted.iteration_s
            for _, predicted in plans
            if all(stage.memory_gib <= stage.limit_gib * (1 + 1e-9) for stage in predicted.stages)
        ),
        default=math.inf,
    )


def searched(case: Case, top: int) -> tuple[Best, Coverage]:
    training, kinds, choices, uneven = case
    best = Best(top)
    return best, explore([Space(training, kinds, choices, uneven=uneven)], best)


@pytest.mark.parametrize("seed", range(fewer(10, 60)))
def test_the_first_plan_is_the_best_of_all_however_many_are_shown(seed: int) -> None:
    case, best = crossed_case(seed), best_of(replayed(seed))
    for top in (1, 3, 12):
        found, seen = searched(case, top)
        first = min((plan.total for plan in found.plans), default=math.inf)
        assert first == pytest.approx(best, rel=1e-9), top
        assert seen.least <= best * (1 + 1e-9)
        for plan in found.plans:
            assert plan.total == pytest.approx(predict_plan(plan).iteration_s, rel=1e-9)
            assert plan.bound <= plan.total * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(fewer(10, 60)))
def test_no_plan_takes_less_than_the_bound_of_its_sizes(seed: int) -> None:
    """In any order, with any partition: of the sizes, schedule and recomputation."""
    _, kinds, *_ = crossed_case(seed)
    bounds, known = LowerBounds(kinds), dict[object, float]()
    for plan, predicted in replayed(seed):
        one = replace(plan.training, parallel=replace(plan.training.parallel, partition=None, node_order=None))
        if one.parallel not in known:
            p = one.parallel
            known[p] = float(bounds.of([one], Way.of(p), kinds)[0])
        assert known[one.parallel] <= predicted.iteration_s * (1 + 1e-9), one.parallel


@pytest.mark.parametrize("seed", range(8, 8 + fewer(5, 30)))
def test_linear_programs_bound_all_plans_more_closely(seed: int) -> None:
    case = crossed_case(seed)
    training, kinds, choices, uneven = case
    best = best_of(replayed(seed))
    found, seen = searched(case, 1)
    spaces = [Space(training, kinds, choices, uneven=uneven)]
    closer = closer_least(spaces, found.plans[0].total if found.plans else 1.0)
    assert closer <= best * (1 + 1e-9)
    assert not found.plans or closer >= seen.least * (1 - 1e-9)
    if math.isfinite(best):  # had the search found none so fast
        assert closer_least(spaces, 1.1 * best) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(fewer(4, 20)))
def test_a_proof_holds_for_replicas_on_different_nodes(seed: int) -> None:
    case = crossed_case(seed)
    plans = prove(searched(case, 3)[0].plans)
    for plan in plans:
        least = math.inf
        for layers in all_partitions(plan.training.blocks.layers, len(plan.partition.layers)).T.tolist():
            partition = Partition(tuple(layers))
            parallel = replace(plan.training.parallel, partition=partition.layers)
            other = replace(plan.training, parallel=parallel)
            predicted = predict_plan(PlacedTraining(training=other, partition=partition, nodes=plan.nodes))
            if all(stage.memory_gib <= stage.limit_gib * (1 + 1e-9) for stage in predicted.stages):
                least = min(least, predicted.iteration_s)
        assert plan.total == pytest.approx(predict_plan(plan).iteration_s, rel=1e-9)
        assert plan.bound <= least * (1 + 1e-9)


def test_no_replica_need_be_as_slow_as_the_slowest_stages_of_three_kinds() -> None:
    """With a fast, two middling and a slow GPU, two replicas of two stages are fast and slow, or both middling: neither
    is middling in one stage and slow in the other, which a bound by the slowest GPU of each stage takes for the best.
    """
    inputs = read(
        [
            "cluster=a10x8",
            "cluster.groups.gpu2.gpus_per_node=1",
            "model=small",
            "model.layers=9",
            "model.vocab_size=128",
        ]
    )
    (a10,) = inputs.kinds
    kinds = [
        replace(
            a10,
            name=name,
            group=replace(a10.group, count=count, inter_gbit_per_s=100_000, inter_latency_us=0),
            factors=Factors(forward=slow, backward=slow),
        )
        for name, count, slow in (("fast", 1, 1.0), ("middling", 2, 2.0), ("slow", 1, 2.7))
    ]
    parallel = replace(inputs.training.parallel, global_batch_size=4)
    training = replace(inputs.training, parallel=parallel)
    choices = Choices(data=(2,), pipeline=(2,), micro_batch_size=(1,), schedule=(Schedule.one_f_one_b,))
    case = training, kinds, choices, False
    best, found = best_of(replay(case)), searched(case, 1)[0].plans[0]
    assert found.total == pytest.approx(best, rel=1e-9)
    one = replace(training, parallel=replace(parallel, data=2, pipeline=2))
    bound = float(LowerBounds(kinds).of([one], Way(Schedule.one_f_one_b, 1, one.parallel.recompute), kinds)[0])
    assert 0.8 * best < bound <= best
