"""Layouts near a plan."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fasop.costs.training import PlacedTraining
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.closing import QUICK
from fasop.search.by_stage.look import explore_near, explore_stages, go_on
from fasop.search.by_stage.neighbours import Sketches
from fasop.search.by_stage.staged_plans import StagedPlans
from fasop.search.inputs import read
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.simulation.predict import predict_plan
from megatron_ext.contract.layout import Layout
from tests.support.fasop.random_clusters import random_case


def test_layouts_near_one_have_its_gpus_and_layers_and_the_fastest_seem_so() -> None:
    """The best plan of the seed's cluster differs in both ends from the best one with equal stages."""
    inputs = read(["experiment=seed_a100x1_a10x7", "train.precision=fp16", "parallel.schedule=zb_h1"])
    nodes = StagedPlans(inputs.training, inputs.kinds, inputs.choices, 2500)
    begin = Layout((1,) * 16, (2,) * 16)
    option = next(number for number, one in enumerate(nodes.options) if one.parallel.micro_batch_size == 1)
    order = next(number for number, one in enumerate(nodes.orders) if one[0].name == "hgx")
    every = nodes.near(begin, (4, 4, *[3] * 13, 1), order, option)
    layouts = [one.layout for one in every]
    assert len({*layouts}) == len(every) > 300
    assert begin not in layouts
    assert LayoutBatch.of(layouts).inside_nodes([4] * 8).all()
    for layout, partitions, _, bound in every:
        assert bound > 0
        assert layout.world_size == 32
        assert {(len(partition), sum(partition)) for partition in partitions} == {(layout.stages, 48)}
        assert min(map(min, partitions)) >= 0
        assert len({*zip(layout.tensors, layout.replicas, strict=True)}) > 1
    best = next(one for one in every if one.layout == Layout((1,) * 18, (1, 1, *[2] * 14, 1, 1)))
    assert best in [one for one in every if one.both_ends][:3]
    assert best.bound < 0.7321
    assert not nodes.near(Layout((1,), (32,)), (48,), order, option)  # of one stage there are none


@pytest.mark.parametrize("free", [0, 1, 2])
def test_balanced_layers_are_all_layers(free: int) -> None:
    """Also where they take no time, in all stages or in some."""
    training, kinds, choices = random_case(np.random.default_rng(1))
    nodes = StagedPlans(training, kinds, choices, 100)
    one, order = nodes.options[0], nodes.orders[0]
    sketches = Sketches(nodes.many, order, nodes.names, one, nodes._work(one))
    for kind in sketches._stages[: len(sketches._stages) if free == 2 else 1] if free else []:
        kind.layer[:, : kind.layer.shape[1] if free == 2 else 1] = 0.0
    assert one.blocks.alike and set(sketches.balanced().sum(axis=1)) == {one.blocks.layers}


def test_near_a_plan_are_those_with_other_micro_batches_that_every_replica_gets_one_of() -> None:
    training, kinds, choices = random_case(np.random.default_rng(1))
    training = replace(training, parallel=replace(training.parallel, global_batch_size=12))
    some = StagedPlans(training, [replace(kind, gpus=2) for kind in kinds[:1]], choices, 100)
    sizes = [one.parallel.micro_batch_size for one in some.options]
    for layout, expected in (
        (Layout((1, 1), (1, 3)), {2, 4}),
        (Layout((1, 1), (1, 4)), {2}),
        (Layout((2, 1), (1, 1)), {2, 4}),
    ):
        found = some.other_micro_batches(layout, sizes.index(3))
        assert {sizes[number] for number in found} == expected
        own = some.options[sizes.index(3)].parallel
        assert all(replace(some.options[number].parallel, micro_batch_size=3) == own for number in found)


def test_near_a_plan_whose_stages_are_alike_lies_a_faster_one() -> None:
    """Within 3 % of what the longer look finds there, in less work; without a plan to begin with there is none."""
    words = ["model=xl", "train=gpt2", "train.precision=fp16", "parallel.global_batch_size=64"]
    inputs = read(["cluster=a100x8_a10x8", "cluster.groups.a10.count=3", *words])
    inputs = replace(inputs, kinds=[kind for kind in inputs.kinds if kind.name == "a10"])
    best, longer, nothing = Best(1), Best(1), Best(1)
    explore([Space(inputs.training, inputs.kinds, inputs.choices)], best)
    (alike,) = best.plans
    longer.add([alike])
    climb = explore_near(inputs.training, [inputs.kinds], inputs.choices, best, QUICK, math.inf)
    explore_stages(inputs.training, [inputs.kinds], inputs.choices, longer, QUICK, math.inf)
    (near,) = best.plans
    assert not near.parallel.alike and near.bound <= near.total < 0.97 * alike.total
    assert longer.plans[0].total <= near.total <= 1.03 * longer.plans[0].total
    predicted = predict_plan(PlacedTraining(training=near.training, partition=near.partition, nodes=near.nodes))
    assert near.total == pytest.approx(predicted.iteration_s)
    assert climb is not None
    go_on(climb, best)
    assert best.plans[0].total < near.total
    assert not explore_near(inputs.training, [inputs.kinds], inputs.choices, nothing, QUICK, math.inf)
    assert not nothing.plans
