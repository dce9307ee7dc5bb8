"""A search finds what trying everything finds, and says what would help where there is nothing to find."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import yaml

from conf.schema.experiment import Experiment
from conf.schema.values.partition import NodeOrder
from fasop.costs.arrays import Integers
from fasop.costs.network.placement import place
from fasop.costs.training import Training
from fasop.partition.baselines import minmax, start
from fasop.partition.exact import Proof
from fasop.partition.local_search import bottleneck, improved
from fasop.search import closer_bounds
from fasop.search.arguments import Arguments
from fasop.search.closer_bounds import closer_least
from fasop.search.findings.words import best_layers
from fasop.search.inputs import read
from fasop.search.proof import prove
from fasop.search.run import best_plans
from fasop.search.search import Best, explore, look_beside
from fasop.search.space.candidates import Space, sizes
from fasop.search.space.node_sets import clusters
from fasop.simulation.pipelines import Pipelines
from fasop.tables.plans import plan_yaml
from tests.support.cases import drawn
from tests.support.fasop.plans import MEGATRON, kinds, mixed, pipelines
from tests.support.fasop.searches import A10X8, MIXED, PLAIN, few, found, nodes, search, space, space_of


def test_other_schedules_begin_with_the_layers_of_the_best_plan() -> None:
    """What plans find from their own beginnings in two rooms is slower than from the layers of the best one."""
    words = ["model=xl", "train.precision=fp16", "cluster=two_rooms", "parallel.global_batch_size=64"]
    inputs = read([*words, "parallel.recompute=none", "parallel.sharded_optimizer=false"])
    best, spaces = Best(1), [space_of(inputs, 2, 2)]
    explore(spaces, best)
    before = best.plans[0]
    look_beside(spaces, best)
    after = best.plans[0]
    assert after.total < 0.995 * before.total
    assert after.nodes == before.nodes and after.parallel.pipeline == before.parallel.pipeline
    look_beside(spaces, best)
    assert best.plans[0] is after
    every, first = Best(30), Best(1)
    explore(spaces, every)
    other = next(plan for plan in every.plans if plan.parallel.pipeline != before.parallel.pipeline)
    first.add([replace(other, total=before.total)])  # a fast one of other sizes
    look_beside(spaces, first)
    assert first.plans[0].parallel == other.parallel
    look_beside(spaces, first, others=[before])
    assert first.plans[0].total == after.total


def test_the_order_of_a_plan_is_looked_at_from_the_beginning() -> None:
    inputs = read(["cluster=a100x8_a10x8", "model=xl", "parallel.global_batch_size=64"])
    here = space_of(inputs, 4, 8)
    assert not here.few
    mixed = [inputs.kinds[number] for number in (0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1)]
    names = [kind.name for kind in mixed]

    def looked_at() -> list[list[str]]:
        return [[nodes.kinds[kind].name for kind in order] for nodes in here.first for order in nodes.orders]

    assert names not in looked_at()
    here.begin_with(mixed[1:])  # fewer nodes than it has
    assert names not in looked_at()
    for _ in range(2):
        here.begin_with(mixed)
        assert looked_at().count(names) == 1


def test_the_best_plans_are_those_that_trying_all_finds() -> None:
    """With small clusters and all partitions of a small model."""
    one = read(["model=xl", "model.layers=4", "cluster=a100x1_a10x7", "parallel.global_batch_size=8"])
    some = few(one.kinds, 1, 1)
    best = math.inf
    for sized in sizes(one.training, some):
        stages = sized.parallel.pipeline
        table = np.array([p for p in itertools.product(range(5), repeat=min(stages, 6)) if sum(p) == 4]).T
        if len(table) < stages:
            continue
        for order in ([0, 1], [1, 0]):
            lines = pipelines(sized, some, np.array([order])).take(np.zeros(table.shape[1], int))
            best = min(best, np.where(lines.fits(table), lines.iteration(table), np.inf).min())
    plan = search(space(one.training, some), 1).plans[0]
    assert plan.total == pytest.approx(best, rel=0.02)
    assert plan.bound <= best


@pytest.mark.parametrize("most", [1, 3, 10])
def test_bounds_leave_out_nothing_that_belongs_to_the_best(most: int) -> None:
    every, whole = space(Training.of(MIXED), nodes(MIXED, [1, 3])), Best(10_000)
    assert explore([every], whole).searched == sum(len(group.orders) for group in every.groups)
    some = found(MIXED, most, counts=[1, 3])
    assert [plan.total for plan in some.plans] == [plan.total for plan in whole.plans[:most]]


def test_the_same_search_says_the_same() -> None:
    assert [plan.parallel for plan in found(MIXED).plans] == [plan.parallel for plan in found(MIXED).plans]


@pytest.mark.parametrize("one", [A10X8, MIXED], ids=["8-a10", "1-a100-7-a10"])
def test_no_plan_is_worse_than_the_public_heuristics(one: Experiment) -> None:
    """Every size and node order, under the same costs."""
    whole = space(Training.of(one), kinds(one))
    theirs = math.inf
    for group in whole.groups:
        split = minmax(group.pipelines, group.layers)
        theirs = min(theirs, np.where(group.pipelines.fits(split), group.pipelines.iteration(split), np.inf).min())
        _, seconds = improved(
            group.pipelines, start(group.pipelines, group.layers, bottleneck(group.pipelines, group.layers))
        )
        assert (seconds <= np.where(group.pipelines.fits(split), group.pipelines.iteration(split), np.inf)).all()
    assert search(whole, 1).plans[0].total < 0.99 * theirs


def test_a_plan_is_a_configuration_that_launch_takes() -> None:
    for plan in found(MIXED, 5).plans:
        p = plan.parallel
        keys = ("tensor", "data", "pipeline", "micro_batch_size", "partition", "node_order")
        back = mixed(*(f"parallel.{key}={getattr(p, key)}" for key in keys))
        assert back.parallel == p


def test_sizes_are_all_that_divide() -> None:
    one = Training.of(A10X8)
    chosen = [s.parallel for s in sizes(one, kinds(A10X8))]
    assert len(chosen) == len({(p.tensor, p.data, p.micro_batch_size) for p in chosen})
    for p in chosen:
        assert p.world_size == 32
        assert 64 % (p.data * p.micro_batch_size) == 0
        place((4,) * 8, p.tensor, p.data, p.pipeline)
    assert {p.tensor for p in chosen} == {1, 2, 4}


def test_one_gpu_has_one_way() -> None:
    one = read(["cluster=a10x8", "cluster.groups.gpu2.gpus_per_node=1", "cluster.groups.gpu2.count=1", "model=small"])
    plans = search(space(one.training, one.kinds), 10).plans
    assert {(p.parallel.world_size, p.parallel.partition) for p in plans} == {(1, "24")}


def test_a_search_whose_time_is_up_has_a_plan_and_says_what_it_left_out() -> None:
    inputs = read(["experiment=seed_a100x1_a10x7", *MEGATRON, *PLAIN])
    spaces = [Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)]
    hasty, best = Best(3), Best(3)
    seen = explore(spaces, hasty, until=0.0)
    assert sum(one.is_bounded for one in spaces) == 1  # or a thousand sets of nodes take minutes
    assert seen.least <= closer_least(spaces, hasty.plans[0].total, 100) <= hasty.plans[0].total
    whole = explore(spaces, best)
    assert (whole.left, bool(hasty.plans)) == (0, True)
    assert 0 < seen.left <= seen.sizes
    assert seen.least <= whole.least <= best.plans[0].total <= hasty.plans[0].total


def test_sizes_whose_work_alone_takes_too_long_cost_a_closer_bound_no_work() -> None:
    """With ZeRO 2 and 3 there are three times as many spaces: no work was left for those that could be fast."""
    inputs = read(["experiment=seed_a100x1_a10x7", *PLAIN])
    spaces = [Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)]
    enough = 1.2 * min(one.floor for one in spaces)
    assert sum(map(len, spaces)) > 10 * sum(int((one.known < enough).sum()) for one in spaces) > 0
    fresh = [Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)]
    assert closer_least(fresh, enough, most=5) == enough


def test_of_a_single_stage_nothing_is_open() -> None:
    """Its bound lay below the only partition, and what was said of all combinations with it."""
    words = ["cluster=v100x2", "cluster.groups.v100.gpus_per_node=1", "model=t5-small", "parallel.zero=3"]
    inputs = read([*words, "parallel.pipeline=1", "parallel.global_batch_size=20"])
    best = Best(1)
    explore([Space(inputs.training, inputs.kinds, inputs.choices)], best)
    assert best.plans[0].bound == best.plans[0].total


def test_a_proof_that_has_ended_is_not_begun_again_with_more_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, real = list[Proof](), closer_bounds.proved

    def proved(one: Pipelines, layers: int, begin: Integers, boxes: int, enough: float, least: float) -> Proof:
        assert not ended
        found = real(one, layers, begin, boxes, enough, least)
        ended.extend([found] if 0 < found.boxes < boxes and found.bound < enough else [])
        return found

    monkeypatch.setattr(closer_bounds, "proved", proved)
    inputs = read(["experiment=seed_a100x1_a10x7", "parallel.schedule=one_f_one_b", "parallel.zero=2"])
    one = Space(inputs.training, inputs.kinds, inputs.choices)
    best = Best(1)
    explore([one], best)
    enough = 0.95 * best.plans[0].total
    assert closer_least([one], enough) == ended[0].bound < enough


def test_a_plan_is_read_as_it_was_written_whatever_its_nodes_are_called() -> None:
    (plan,) = found(A10X8, 1).plans
    for order in ("1e3", "null+010*2", "on"):
        groups = NodeOrder.parse(order).groups
        parallel = replace(plan.training.parallel, node_order=groups)
        named = replace(plan, training=replace(plan.training, parallel=parallel))
        read = yaml.safe_load(plan_yaml(named, "tdpp search 'name=a\ntensor: 7'"))
        unset = {"schedule_file", "expert", "context", "islands", "shares", "replicas", "streams", "depth", "zero"}
        unset |= {"semantics", "update_every"}
        assert read == {key: value for key, value in asdict(named.parallel).items() if key not in unset}


@pytest.mark.parametrize(
    ("gap", "told"),
    [(1e-6, "has the best layers per stage"), (2e-4, "at most 0.1%"), (0.012, "at most 1.2%")],
    ids=["none", "small", "some"],
)
def test_a_gap_is_never_told_to_be_none(gap: float, told: str) -> None:
    assert told in best_layers(gap)


def test_the_best_plan_of_the_mixed_cluster_is_proved_to_have_the_best_partition() -> None:
    """The other plans that are shown keep their places, or a better one: a proof never makes a plan slower."""
    plans = found(MIXED, 2).plans
    proofs = prove(plans)
    assert proofs[0].gap < 1e-5
    assert all(
        proof.total <= plan.total and plan.bound <= proof.bound for plan, proof in zip(plans, proofs, strict=True)
    )


@pytest.mark.parametrize(
    ("counts", "batch", "told"),
    [
        ((1, 0), 64, "the one node order"),
        *drawn(
            [((1000, 0), 8000, "the one node order"), ((8192, 8192), 2**17, "of about 10^4929")],
            0,
            always=[((1000, 0), 8000, "the one node order")],
        ),
        pytest.param((1024, 1024), 2**14, "of about 10^614", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_nodes_gets_an_answer(counts: tuple[int, int], batch: int, told: str) -> None:
    groups = [
        f"cluster.groups.{name}.count={count}" for name, count in zip(("a100", "a10"), counts, strict=True) if count
    ]
    order = [] if all(counts) else ["~cluster.groups.a10"]
    asked = ["cluster=a100x8_a10x8", "model=xl", "train.precision=fp16", f"parallel.global_batch_size={batch}"]
    only = ["parallel.schedule=one_f_one_b", "parallel.micro_batch_size=1"]
    outcome = best_plans(read([*asked, *groups, *order, *only]), Arguments(top=1, leave_out=False))
    assert told in "\n".join(outcome.summary)
    assert outcome.plans[0].parallel.world_size == 8 * sum(counts)
