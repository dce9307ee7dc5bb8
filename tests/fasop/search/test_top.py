"""The first plans of a search against all plans: however many and whatever else is asked for, in the same order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from conf.schema.experiment import Schedule
from fasop.costs.hardware import NodeKind
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.plan import Plan, Run, by_time
from fasop.search.run import best_plans
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.choices import Choices
from fasop.search.space.node_sets import clusters, with_room
from tests.support.cases import fewer
from tests.support.fasop.plans import pipelines
from tests.support.fasop.random_clusters import all_sizes, random_case
from tests.support.fasop.random_pipelines import all_partitions
from tests.support.fasop.seeds import seeds

MOST = 30_000
"""Partitions in all orders of a cluster that are tried one and all."""
MOST_SETS = 8
"""Sets of nodes that are searched again and again."""


def case(seed: int) -> tuple[Training, list[NodeKind], Choices]:
    """A few nodes and GPUs, and one way to save memory, so that no option is left out for another."""
    rng = np.random.default_rng(seed)
    training, kinds, choices = random_case(rng)
    layers, batch = int(rng.integers(4, 9)), int(rng.choice([3, 4, 6, 9, 12]))
    training = replace(
        training,
        model=replace(training.model, layers=layers),
        parallel=replace(training.parallel, global_batch_size=batch),
    )
    choices = replace(choices, recompute=choices.recompute[-1:], sharded_optimizer=choices.sharded_optimizer[-1:])
    return training, kinds, choices


def sizes_of(one: Parallelism) -> tuple[object, ...]:
    return one.tensor, one.data, one.pipeline, one.micro_batch_size, one.schedule


def every(training: Training, kinds: list[NodeKind], choices: Choices) -> Iterator[tuple[float, tuple[object, ...]]]:
    """Seconds and sizes of the best partition in each node order; as a search has it, one stage has 1F1B alone."""
    nodes = [number for number, kind in enumerate(kinds) for _ in range(kind.group.count)]
    for sized in all_sizes(training, kinds, choices):
        one = sized.parallel
        if one.pipeline == 1 and one.schedule is not Schedule.one_f_one_b and Schedule.one_f_one_b in choices.schedule:
            continue
        table = all_partitions(training.model.counted, one.virtual_stages)
        for order in sorted({*itertools.permutations(nodes)}):
            lines = pipelines(sized, kinds, np.array([order])).take(np.zeros(table.shape[1], int))
            seconds = np.where(lines.fits(table), lines.iteration(table), np.inf).min()
            if np.isfinite(seconds):
                yield float(seconds), sizes_of(one)


def work(training: Training, kinds: list[NodeKind], choices: Choices) -> int:
    """Partitions in all orders."""
    counts = [kind.group.count for kind in kinds]
    orders = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    layers = training.model.counted
    stages = [one.parallel.virtual_stages for one in all_sizes(training, kinds, choices)]
    return orders * sum(math.comb(layers + number - 1, layers) for number in stages)


def first(top: int, training: Training, kinds: list[NodeKind], choices: Choices) -> list[Plan]:
    best = Best(top)
    explore([Space(training, kinds, choices)], best)
    return best.plans


def rounded(seconds: float) -> str:
    return f"{seconds:.9e}"


@pytest.mark.slow
def test_the_first_plans_are_the_fastest_of_all_and_begin_those_of_a_longer_list() -> None:
    looked = unlike = 0
    for seed in seeds(60):
        one = case(seed)
        if work(*one) > MOST:
            continue
        whole = first(100_000, *one)
        all_of_them = {(rounded(seconds), sizes) for seconds, sizes in every(*one)}
        assert {(rounded(plan.total), sizes_of(plan.training.parallel)) for plan in whole} == all_of_them
        for top in (1, 3, 10, 50):
            assert [plan.training.parallel for plan in first(top, *one)] == [
                plan.training.parallel for plan in whole[:top]
            ]
        looked, unlike = looked + 1, unlike + (len(one[1]) > 1)
    assert looked >= 20
    assert unlike >= 10


@pytest.mark.slow
@pytest.mark.parametrize("args", [Arguments(), Arguments(prove=True, by_stage=True)], ids=["default", "all"])
def test_the_first_plans_on_all_sets_of_nodes_begin_one_ranking(args: Arguments) -> None:
    """Whatever `top=`, no plan comes twice; before those of all sizes come only faster ones, of shares, stages or less
    that is computed again, or, where memory is short, of ZeRO 3."""
    looked = unlike = 0
    for seed in seeds(fewer(40, 400)):
        training, kinds, choices = random_case(np.random.default_rng(seed))
        sets = with_room(training, clusters(kinds))
        every = Best(100_000)
        for uneven in (False, True) if len(sets) <= MOST_SETS else ():
            explore([Space(training, some, choices, uneven=uneven) for some in sets], every)
        if not every.plans:
            continue
        run = Run(iterations=1)
        inputs = replace(read(["cluster=a10x8"]), training=training, kinds=kinds, choices=choices, run=run)
        ranked = best_plans(inputs, replace(args, top=30)).plans
        found = [plan.training.parallel for plan in ranked]
        assert [*ranked] == sorted(ranked, key=by_time)
        assert len({replace(one, partition=None) for one in found}) == len(found)
        alike = [plan.pipelines is not None and plan.training.parallel.zero is None for plan in ranked]
        more = alike.index(True)
        assert found[more:] == [plan.training.parallel for plan in every.plans[: len(found) - more]]
        assert len(found) >= min(30, len(every.plans))
        for top in (1, 3):
            first = best_plans(inputs, replace(args, top=top)).plans
            assert [plan.training.parallel for plan in first[:top]] == found[:top]
        looked, unlike = looked + 1, unlike + (len(kinds) > 1)
    assert looked >= 8
    assert unlike >= 2
