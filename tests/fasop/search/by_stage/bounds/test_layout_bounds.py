"""No plan whose stages differ takes less than its bounds say, and these lie close."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from conf.schema.values.partition import Partition
from fasop.costs.arrays import Floats
from fasop.costs.hardware import Factors, NodeKind
from fasop.costs.overlap import first_bucket_layers
from fasop.costs.training import PlacedTraining, Training
from fasop.partition import bounds
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.by_stage.bounds import layout_bounds, whole_layers
from fasop.search.by_stage.bounds.chains import Work, sized
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.bounds.layout_bounds import PlacedLayouts
from fasop.search.by_stage.bounds.longest_paths import LongestPaths
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.layouts import layouts
from fasop.search.by_stage.staged_plans import SCHEDULES, StagedPlans
from fasop.search.inputs import read
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages
from megatron_ext.contract.parallel_config import Recompute, Schedule
from tests.support.cases import fast_first, fewer
from tests.support.fasop.random_clusters import NETWORKS, random_case
from tests.support.fasop.random_pipelines import all_partitions
from tests.support.fasop.staged_plans import fastest, replay_of, small_case


@pytest.mark.parametrize(("seed", "network"), fast_first(3 * len(NETWORKS), product(range(30, 42), NETWORKS)))
def test_no_plan_is_below_its_bounds(seed: int, network: str) -> None:
    _, kinds, _, plans = small_case(seed, alike=seed % 3 != 0, network=network)
    names = [kind.name for kind in kinds]
    for plan in plans[:: max(1, len(plans) // 12)]:
        one, layout = plan.training, plan.training.parallel.layout
        work = Work(one, kinds, sorted(set(layout.tensors)))
        many, taken = LayoutBatch.of([layout]), fastest(plan)
        assert many.inside_nodes([node.gpus for node in plan.nodes]).all()
        placed, sharded = PlacedLayouts(many, plan.nodes, names), one.parallel.sharded_optimizer
        of_tensors = [sized(one, tensor) for tensor in work.sizes]
        assert 0 < LowerBounds(kinds).of_work(of_tensors, [one.parallel.recompute], kinds) <= taken * (1 + 1e-9)
        assert 0 < placed.shortest_trip(one, work)[0] <= taken * (1 + 1e-9)
        without_messages = placed.trip_alone(one, work, np.zeros(1, int))[0]
        assert 0 < without_messages <= placed.trip_in_parts(one, work).min() * (1 + 1e-9)
        assert placed.trip_in_parts(one, work)[int(sharded), 0] <= taken * (1 + 1e-9)
        assert placed.least_seconds(one, work)[int(sharded), 0] <= taken * (1 + 1e-9)
        assert placed.trip_seconds(one, work)[int(sharded), 0] <= taken * (1 + 1e-9)
        assert placed.turning_seconds(one, work)[int(sharded), 0] <= taken * (1 + 1e-9)
        candidate = Candidate(one, plan.nodes, work, names)
        assert candidate.bound <= taken * (1 + 1e-9)
        for limit in (0.98 * taken, taken, 1.5 * taken):
            candidate.tighten(limit)
            assert candidate.bound <= taken * (1 + 1e-9)
            other = Candidate(one, plan.nodes, work, names)
            other.rule_out(limit)
            assert other.bound <= taken * (1 + 1e-9)


def test_layouts_of_which_nothing_is_to_be_tried_have_no_rows() -> None:
    """As where sequences cannot be shared by the largest tensor groups, and shall be."""
    inputs = read(["experiment=seed_a100x1_a10x7", "train.precision=fp16", "parallel.schedule=zb_h1"])
    nodes = StagedPlans(inputs.training, inputs.kinds, replace(inputs.choices, micro_batch_size=(3,)), 60)
    assert nodes.wanted
    assert not nodes.options
    assert not [*nodes.rows(0, range(len(nodes.orders)), np.isfinite)]


@pytest.mark.parametrize("network", ["plain", "links"])
def test_no_option_is_below_the_bound_of_the_options_that_it_is_bounded_with(network: str) -> None:
    rows = 0
    for seed in range(fewer(18, 60)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng)
        kinds = [*NETWORKS[network](rng, kinds)]
        nodes = StagedPlans(training, kinds, choices, 60)
        every = [row for some in nodes.rows(0, range(len(nodes.orders))[:2], np.isfinite) for row in some.every]
        for number in rng.permutation(len(every))[:20]:
            row = every[number]
            for option in row.numbers:
                one = nodes.candidate(nodes.wanted[row.layout], row.order, option)
                bound = row.of_sharded if one.training.parallel.sharded_optimizer else row.bound
                if one.few and math.isfinite(one.bound):
                    assert bound <= one.seconds(one.every()).min() * (1 + 1e-9), (seed, number, option)
                    rows += 1
    assert rows > 200


@pytest.mark.parametrize("recompute", [("full", "full:1"), ("full", "selective")])
def test_what_computes_less_again_is_not_bounded_by_what_computes_more(recompute: tuple[str, str]) -> None:
    """With a schedule that splits backward passes, where each way is tried with another schedule, too."""
    compared = 0
    for seed in (14, 20, 27, 34, 35):
        training, kinds, choices = random_case(np.random.default_rng(seed))
        parallel, model = replace(training.parallel, global_batch_size=24), replace(training.model, layers=12)
        choices = replace(
            choices,
            pipeline=(2,),
            micro_batch_size=(1,),
            sharded_optimizer=(False,),
            recompute=tuple(map(Recompute, recompute)),
            schedule=(Schedule.zb_h1, Schedule.one_f_one_b),
        )
        nodes = StagedPlans(replace(training, model=model, parallel=parallel), kinds, choices, 60)
        for row in [row for some in nodes.rows(0, [0], np.isfinite) for row in some.every]:
            for option in row.numbers:
                one = nodes.candidate(nodes.wanted[row.layout], row.order, option)
                assert row.bound <= one.seconds(one.every()).min() * (1 + 1e-9), (seed, option)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize("network", ["plain", "links"])
def test_no_partition_takes_less_than_its_stages_with_their_layers_say(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a search need not look at neighbours that are bounded by what it has."""
    compared, left_out = 0, 0
    for seed in range(fewer(16, 60)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng)
        nodes = StagedPlans(training, [*NETWORKS[network](rng, kinds)], choices, 60)
        for _ in range(fewer(5, 20) if nodes.wanted and nodes.options else 0):
            row, order, option = (int(rng.integers(len(of))) for of in (nodes.wanted, nodes.orders, nodes.options))
            layout, parallel = nodes.wanted[row], nodes.options[option].parallel
            if max(layout.replicas) * parallel.micro_batch_size > parallel.global_batch_size:
                continue
            one = nodes.candidate(layout, order, option)
            if not one.alike or math.isinf(one.bound):
                continue
            layers = one.training.blocks.layers
            some = rng.multinomial(layers, rng.dirichlet(np.ones(layout.stages)), 50).T
            taken, least = one.seconds(some), one._tables.least_of(some)
            with monkeypatch.context() as patch:
                patch.setattr(whole_layers, "compiled", None)
                assert np.array_equal(one._tables.least_of(some), least)
            assert (least <= taken).all(), (seed, row, order, option)
            compared += int(np.isfinite(taken).sum())
            left_out += int((least > taken.min()).sum())
    assert compared > 500 and left_out > compared / 3


BETWEEN = (
    "topology={}",
    "topology={room: {groups: [gpu2], gbit_per_s: 10}}",
    "topology={room: {groups: [hgx], gbit_per_s: 3}, hall: {groups: [gpu2], gbit_per_s: 20}}",
    "links={hgx: {gpu2: {gbit_per_s: 2}}, gpu2: {hgx: {gbit_per_s: 1, latency_us: 900}, gpu2: {gbit_per_s: 100}}}",
    "links={hgx: {gpu2: {gbit_per_s_by_bytes: {4096: 1, 1048576: 30}}}, gpu2: {hgx: {gbit_per_s: 4}}}",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_of_compiled_loops_are_those_of_numpy_to_the_last_bit(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = read(["experiment=seed_a100x1_a10x7", "train.precision=fp16"])
    staged = StagedPlans(inputs.training, inputs.kinds, inputs.choices, 2500)
    every = [one for one in staged.options if one.parallel.schedule is schedule]
    one = next(one for one in every if one.parallel.micro_batch_size == 2)
    work = Work(one, staged.kinds, staged.tensors)
    for order in (0, 3):
        placed = PlacedLayouts(staged.many, staged.orders[order], staged.names)

        def every_bound(placed: PlacedLayouts = placed) -> list[Floats]:
            some = placed.trip_alone(one, work, np.arange(0, len(staged.wanted), 3))
            return [some, placed.trip_in_parts(one, work), placed.trip_seconds(one, work)]

        found = every_bound()
        with monkeypatch.context() as patch:
            patch.setattr(layout_bounds, "compiled", None)
            patch.setattr(bounds, "compiled", None)
            by_numpy = every_bound()
        for compiled, plain in zip(found, by_numpy, strict=True):
            assert np.array_equal(compiled, plain)


@pytest.mark.parametrize("network", NETWORKS)
def test_whole_layers_are_shared_out_alike_with_and_without_a_compiler(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tightened: dict[bool, list[float]] = {}
    for has_compiler in (True, False):
        if not has_compiler:
            monkeypatch.setattr(whole_layers, "compiled", None)
        for seed in range(30, 36):
            _, kinds, _, plans = small_case(seed, network=network)
            for plan in plans[:: max(1, len(plans) // 12)]:
                work = Work(plan.training, kinds, sorted(set(plan.training.parallel.layout.tensors)))
                one = Candidate(plan.training, plan.nodes, work, [kind.name for kind in kinds])
                one.tighten(3 * one.bound)
                tightened.setdefault(has_compiler, []).append(one.bound)
    assert tightened[True] == tightened[False]
    assert len(set(tightened[True])) > 20


@pytest.mark.parametrize("between", BETWEEN)
def test_no_message_and_no_sum_of_a_layout_takes_less_than_its_bound(between: str) -> None:
    counts = ["cluster.groups.hgx.count=2", "cluster.groups.gpu2.count=3"]
    inputs = read(["experiment=seed_a100x1_a10x7", *counts, f"+cluster.{between}"])
    kinds, random, waits = inputs.kinds, np.random.default_rng(0), 0
    every = layouts(20, 4, [1, 2, 4], 20, 400).every
    for number in random.permutation(len(every))[:80]:
        layout, nodes = every[number], [kinds[kind] for kind in random.permutation([0, 0, 1, 1, 1])]
        many = LayoutBatch.of([layout])
        if layout.even or not many.inside_nodes([4] * 5).all():
            continue
        sizes = {"tensor": tuple(layout.tensors), "data": max(layout.replicas), "replicas": tuple(layout.replicas)}
        parallel = replace(inputs.training.parallel, **sizes, pipeline=layout.stages, micro_batch_size=1)
        one = replace(inputs.training, parallel=replace(parallel, sharded_optimizer=False))
        stages = HeterogeneousStages(PlacedTraining(training=one, partition=Partition(()), nodes=nodes))
        work = Work(one, kinds, [1, 2, 4])
        placed = PlacedLayouts(many, nodes, [kind.name for kind in kinds])
        lines = [stages.whole[size].pipelines for size in stages.sizes]
        hops = np.array([some.hop[stage, 0] for stage, some in enumerate(lines)][:-1])
        busy = np.array([some.occupied[stage, 0] for stage, some in enumerate(lines)][:-1])
        one_way = [stages.one_way_out(stage) for stage in range(layout.stages)]
        sums = np.array([some.sums.layer[..., stage, 0].max() for stage, some in enumerate(lines)])
        assert (placed._hops(work)[0, :-1] <= hops * (1 + 1e-9)).all()
        assert (placed._messages(work)[0, :-1, 1] <= busy * (1 + 1e-9)).all()
        assert (placed._messages(work)[0, :, 2] <= one_way).all()
        assert (2 * placed._scattered(work)[0] <= sums * (1 + 1e-9)).all()
        assert placed._ending(one)[0] <= max(map(stages.embedding, range(layout.stages))) * (1 + 1e-9)
        waits += int((placed._scattered(work) > 0).sum())
    assert waits > 20


@pytest.mark.parametrize("seed", range(50, 62))
def test_longest_paths_are_below_every_partition_and_prove_the_best(seed: int) -> None:
    _, kinds, _, plans = small_case(seed, alike=True)
    names, random = [kind.name for kind in kinds], np.random.default_rng(seed)
    for plan in plans[:: max(1, len(plans) // 6)]:
        one, layout, layers = plan.training, plan.training.parallel.layout, plan.training.blocks.layers
        every, stages, replay = all_partitions(layers, layout.stages), HeterogeneousStages(plan), replay_of(plan)
        between = random.dirichlet(np.ones(layout.stages), 20).T * layers
        paths = LongestPaths(stages, replay, layers)
        slopes, constants = paths.longest(np.concatenate([every[:, ::3], between], axis=1))
        assert len(constants) >= 15  # of those between whole layers, few have paths that are equally long
        assert (constants[:, np.newaxis] + slopes.T @ every <= replay.seconds(stages.columns(every)) * (1 + 1e-9)).all()
        taken = fastest(plan)
        candidate = Candidate(one, plan.nodes, Work(one, kinds, sorted(set(layout.tensors))), names)
        begin = candidate.search(math.inf)[0]
        if math.isfinite(taken):
            for boxes in (0, 400):
                begin, best = candidate.prove(begin, boxes, 10 * taken)
                assert candidate.bound <= taken * (1 + 1e-9)
                assert candidate.seconds(begin.reshape(-1, 1))[0] == best >= taken * (1 - 1e-9)
            # Where a backward pass hides a part of what is summed, the longest paths bend within a layer.
            bends = one.overlaps and any(first_bucket_layers(one.model, tensor) < layers for tensor in layout.tensors)
            assert best == pytest.approx(taken, rel=1e-2 if bends else 1e-6)
            assert candidate.bound == pytest.approx(taken, rel=1e-2 if bends else 1e-5)


def staged(replicas: tuple[int, ...], *, sharded: bool) -> tuple[Training, list[NodeKind]]:
    """The seed's training on eight nodes of four A10, with so many replicas by stage."""
    inputs = read(["experiment=seed_a10x8"])
    parallel = replace(
        inputs.training.parallel,
        tensor=1,
        data=max(replicas),
        replicas=replicas,
        pipeline=len(replicas),
        micro_batch_size=1,
        schedule=Schedule.zb_h1,
        sharded_optimizer=sharded,
    )
    return replace(inputs.training, parallel=parallel), [*inputs.kinds]


@pytest.mark.parametrize("sharded", [False, True])
def test_whole_layers_leave_little_open_of_a_layout_that_no_search_reaches(sharded: bool) -> None:
    """The fastest of the layouts with three kinds of stages takes 866.0 ms, this one far more."""
    one, kinds = staged((1, *[3] * 10, 1), sharded=sharded)
    nodes = [kind for kind in kinds for _ in range(kind.group.count)]
    names = [kind.name for kind in kinds]
    candidate = Candidate(one, nodes, Work(one, kinds, [1]), names)
    candidate.tighten(0.866)
    assert candidate.bound > 0.98 * 0.866
    assert candidate.bound <= candidate.seconds(candidate.balanced())[0]


@pytest.mark.parametrize("replicas", [(1, 1, *[2] * 14, 1, 1), (1, *[3] * 10, 1), (1, 1, 1, 1, *[8] * 3, 1, 1, 1, 1)])
def test_many_layouts_are_bounded_nearly_as_closely_as_one(replicas: tuple[int, ...]) -> None:
    """With the messages between its own nodes, and the first step."""
    one, kinds = staged(replicas, sharded=True)
    nodes, work = [kind for kind in kinds for _ in range(kind.group.count)], Work(one, kinds, [1])
    names = [kind.name for kind in kinds]
    placed = PlacedLayouts(LayoutBatch.of([one.parallel.layout]), nodes, names)
    bounds = [placed.least_seconds(one, work)[1, 0], placed.trip_seconds(one, work)[1, 0]]
    assert 0.99 * Candidate(one, nodes, work, names).bound < max(bounds)


def test_a_micro_batch_may_go_there_and_back_through_unlike_replicas() -> None:
    """Where kinds of nodes differ in the ratio of their passes, and stages in their numbers of replicas."""
    _, kinds, _, plans = small_case(1)
    kinds = [
        replace(kind, factors=Factors(forward=(8.0, 0.5)[number % 2], backward=(0.3, 4.0)[number % 2]))
        for number, kind in enumerate(kinds)
    ]
    by_name = {kind.name: kind for kind in kinds}
    for plan in plans[:: max(1, len(plans) // 12)]:
        plan = replace(plan, nodes=[by_name[node.name] for node in plan.nodes])
        work = Work(plan.training, kinds, sorted(set(plan.training.parallel.layout.tensors)))
        assert Candidate(plan.training, plan.nodes, work, [*by_name]).bound <= fastest(plan) * (1 + 1e-9)
