"""A search finds what trying everything finds, and says what would help where there is nothing to find."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import yaml

from conf.compose import compose
from conf.schema.experiment import Experiment, Schedule
from conf.schema.values.partition import NodeOrder
from fasop.costs.arrays import Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.memory.activations import kept_by_layer
from fasop.costs.network.placement import place
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.partition.baselines import minmax, start
from fasop.partition.dominance import never_worse
from fasop.partition.exact import Proof
from fasop.partition.local_search import bottleneck, improved
from fasop.search import closer_bounds
from fasop.search.arguments import Arguments
from fasop.search.closer_bounds import closer_least
from fasop.search.findings.words import best_layers
from fasop.search.inputs import Inputs, read, scattering
from fasop.search.lower_bound import LowerBounds
from fasop.search.proof import prove
from fasop.search.run import best_plans
from fasop.search.search import Best, explore, look_beside
from fasop.search.space.candidates import Space, raise_known, sizes
from fasop.search.space.node_sets import MOST as MOST_CLUSTERS
from fasop.search.space.node_sets import clusters, step
from fasop.simulation.pipelines import Pipelines
from fasop.tables.plans import options, plan_yaml
from tests.support.cases import drawn
from tests.support.fasop.plans import FP32, MEGATRON, experiment, kinds, mixed, pipelines
from tests.support.fasop.searches import bounds, search, space

KEYS = (
    *("tensor", "data", "pipeline", "micro_batch_size", "schedule", "chunks"),
    *("recompute", "sharded_optimizer", "sequence_parallel"),
)

PLAIN = ("parallel.schedule=one_f_one_b", "parallel.recompute=none", "parallel.sharded_optimizer=false")

A10X8, MIXED = experiment(*MEGATRON), mixed(*MEGATRON)


def found(one: Experiment, most: int = 10, counts: Sequence[int] | None = None) -> Best:
    return search(space(Training.of(one), nodes(one, counts)), most)


def nodes(one: Experiment, counts: Sequence[int] | None = None) -> Sequence[NodeKind]:
    return kinds(one) if counts is None else few(kinds(one), *counts)


def space_of(inputs: Inputs, *counts: int) -> Space:
    return space(inputs.training, few(inputs.kinds, *counts), inputs.choices)


def few(whole: Sequence[NodeKind], *counts: int) -> Sequence[NodeKind]:
    return [replace(k, group=replace(k.group, count=n)) for k, n in zip(whole, counts, strict=True)]


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


def test_a_single_stage_has_one_schedule_and_no_other_is_faster() -> None:
    words = (
        *("cluster=a10x8", "model=xl", "train.precision=fp16", "parallel.global_batch_size=16"),
        *("parallel.pipeline=1", "parallel.recompute=full"),
    )
    best = {plan.parallel: plan.total for plan in search(space_of(read(words), 1), 20).plans}
    assert {parallel.schedule for parallel in best} == {Schedule.one_f_one_b}
    for schedule in (Schedule.gpipe, Schedule.zb_h1):
        for other in search(space_of(read([*words, f"parallel.schedule={schedule}"]), 1), 20).plans:
            assert best[replace(other.parallel, schedule=Schedule.one_f_one_b)] <= other.total * (1 + 1e-9)


def test_what_fits_nowhere_says_what_would_do() -> None:
    one = read(["cluster=a10x8", "model=13b", "parallel.global_batch_size=64"])
    with pytest.raises(SearchError) as told:
        space(one.training, few(one.kinds, 1))
    text = str(told.value)
    assert (
        "model=13b with parallel.global_batch_size=64 does not fit in the memory of cluster.gpus (A10 22.2 GiB) with"
        in text
    )
    percent, times = re.findall(r"(\d+) % of this memory on every GPU; or (\d+) times as many nodes", text)[0]
    (a10,) = few(one.kinds, 1)
    larger = replace(a10, gpu=replace(a10.gpu, memory_gib=22.2 * int(percent) / 100))
    assert [*space(one.training, [larger]).groups]
    assert [*space(one.training, few(one.kinds, int(times))).groups]


def test_the_optimizer_is_offloaded_where_nothing_fits_without() -> None:
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "parallel.global_batch_size=8"]
    words += ["parallel.data=1", "parallel.tensor=1", "parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b"]
    words += ["parallel.recompute=full", "train.precision=bf16"]
    small, args = "cluster.gpus.a10.memory_gib=6.5", Arguments(top=1, by_stage=False)
    plain = best_plans(read(words), args).plans[0]
    given = best_plans(read([*words, "parallel.offload=optimizer"]), args).plans[0]
    found = best_plans(read([*words, small]), args)
    assert (plain.parallel.offload, given.parallel.offload) == ("none", "optimizer")
    assert found.plans[0].parallel == given.parallel
    assert "offload: none" in plan_yaml(plain, "")
    assert "offload: optimizer" in plan_yaml(found.plans[0], "")
    parameters = read(words).training.model.parameters()
    assert f"all nodes together has {12 * parameters / 2**30:.0f} GiB of what the optimizer" in found.summary[0]
    # 12 bytes a parameter come to the GPU, more slowly than it updates them.
    stage = max(given.pipelines.optimizer.of(np.array(given.partition.layers)[:, np.newaxis]).ravel())
    assert stage == pytest.approx(12 * parameters / 4 / 24e9, rel=0.2)
    for refused in ("parallel.offload=none", "train.optimizer=lamb"):
        with pytest.raises(SearchError, match=r"does not fit .* % of this memory"):
            best_plans(read([*words, small, refused]), args)


@pytest.mark.parametrize(("gib", "batch"), [(9.0, 64), (8.0, 24)])
def test_offloading_is_looked_at_where_other_plans_fit_and_memory_is_short(gib: float, batch: int) -> None:
    """No way to offload is faster where it is asked for: one stage whose activations wait in the nodes' memory takes
    less than two without, and than four that compute layers again."""
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", f"cluster.gpus.a10.memory_gib={gib}", "model=xl"]
    words += ["train.precision=bf16", f"parallel.global_batch_size={batch}", "parallel.schedule=one_f_one_b"]
    args = Arguments(top=2, by_stage=False)

    def alone(*more: str) -> float:
        return best_plans(read([*words, *more]), args).plans[0].total

    ways = ("optimizer", "activations", "both")
    asked = {way: min(alone(f"parallel.offload={way}", *zero) for zero in ((), ("parallel.zero=3",))) for way in ways}
    found, without = (best_plans(read([*words, *more]), args).plans for more in ([], ["parallel.offload=none"]))
    assert found[0].total <= min(asked.values()) < 0.9 * without[0].total
    assert found[0].parallel.offload in ("activations", "both") and asked[found[0].parallel.offload] == found[0].total
    assert found[1].total >= found[0].total and found[1].parallel.offload == "none"


@pytest.mark.parametrize("option", ["offload=optimizer", "zero=3", "shards=memory", "hierarchical_reduce=true"])
def test_what_no_launch_with_another_engine_accepts_is_not_searched_with_it(option: str) -> None:
    words = ["cluster=a10x8", "model=xl", "engine=megatron_core", "parallel.global_batch_size=64"]
    with pytest.raises(SearchError, match=rf"parallel\.{option} cannot be searched with engine=megatron_core.*use"):
        read([*words, f"parallel.{option}"])


def test_offloaded_activations_take_their_time_and_nothing_is_computed_again() -> None:
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "parallel.global_batch_size=8"]
    words += ["parallel.data=1", "parallel.tensor=1", "parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b"]
    words += ["train.precision=bf16", "parallel.offload=activations"]
    slow, args = "cluster.gpus.a10.host_gb_per_s=2", Arguments(top=1, by_stage=False)
    plain = best_plans(read([*words[:-1], "parallel.recompute=none"]), args).plans[0]
    quick, slowed = (best_plans(read([*words, *more]), args).plans[0] for more in ([], [slow]))
    assert quick.parallel.recompute == slowed.parallel.recompute == "none"
    assert quick.total == pytest.approx(plain.total, rel=0.05)
    assert "activations" in plan_yaml(quick, "")
    layers = max(slowed.partition.layers)
    kept = kept_by_layer(slowed.training, 0) / 2e9
    assert slowed.total > 8 * 2 * layers * kept > 1.5 * quick.total
    with pytest.raises(SearchError, match=r"activations cannot be combined with parallel\.recompute=full"):
        read([*words, "parallel.recompute=full"])


@pytest.mark.parametrize("zero", [2, 3])
def test_plans_that_scatter_gradients_are_searched_where_they_are_asked_for(zero: int) -> None:
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "parallel.global_batch_size=8"]
    words += ["parallel.data=4", "parallel.tensor=1", "parallel.micro_batch_size=1", "train.precision=bf16"]
    args = Arguments(top=1, by_stage=False)
    plain, found = (best_plans(read([*words, *more]), args).plans[0] for more in ([], [f"parallel.zero={zero}"]))
    assert (plain.parallel.zero, found.parallel.zero, found.parallel.sharded_optimizer) == (None, zero, True)
    text = plan_yaml(found, "")
    assert f"zero: {zero}" in text and "sharded_optimizer" not in text and "zero" not in plan_yaml(plain, "")
    assert f"ZeRO stage {zero}" in options(found.training.parallel)
    with pytest.raises(SearchError, match=f"stages that differ cannot have parallel.zero={zero}"):
        best_plans(read([*words, f"parallel.zero={zero}"]), Arguments(top=1, by_stage=True))


def test_a_batch_that_no_replicas_divide_is_told_with_near_ones() -> None:
    one = read(["cluster=a10x8", "model=tiny", "parallel.micro_batch_size=1", "parallel.global_batch_size=6"])
    with pytest.raises(
        SearchError,
        match=r"is not divisible by any number of replicas that 256 GPUs .*: 16, 32, .*; the nearest divisible .* 16",
    ):
        space(one.training, few(one.kinds, 64))


def test_tensor_sizes_that_suit_nobody_are_told() -> None:
    one = read(["cluster=a10x8", "model=xl", "parallel.global_batch_size=64", "train.precision=fp16"])
    (a10,) = one.kinds
    assert a10.profile is not None
    only8 = replace(a10.profile, costs=[replace(a10.profile.costs[0], tensor=8)])
    with pytest.raises(
        SearchError, match=r"no tensor size suits .*gpu2: 4 GPUs per node, profile a10 with tensor sizes 8"
    ):
        space(one.training, [replace(a10, profile=only8)])


def test_options_are_searched_as_if_each_had_been_asked_for_alone() -> None:
    """What is left out because another option is never worse is none of the best."""
    one = read(["experiment=seed_a100x1_a10x7", "model.layers=12", "parallel.tensor=1"])
    some = few(one.kinds, 1, 1)
    apart = []
    for schedule, recompute, sharded in itertools.product(one.choices.schedule, one.choices.recompute, (False, True)):
        only = replace(one.choices, schedule=(schedule,), recompute=(recompute,), sharded_optimizer=(sharded,))
        apart += [plan.total for plan in search(space(one.training, some, only), 3).plans]
    together = search(space(one.training, some, one.choices), 5)
    assert together.plans[0].total == pytest.approx(min(apart), rel=1e-12)
    assert {round(plan.total, 9) for plan in together.plans} <= {round(total, 9) for total in apart}


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "interleaved", "zb_h1"])
def test_an_option_that_is_never_worse_is_so_for_every_partition(name: str) -> None:
    one = read(["experiment=seed_a100x1_a10x7", FP32, "model.layers=6", f"parallel.schedule={name}"])
    some = [replace(k, gpu=replace(k.gpu, memory_gib=80)) for k in few(one.kinds, 1, 1)]
    table = np.array([p for p in itertools.product(range(7), repeat=4) if sum(p) == 6]).T
    compared = 0
    stages = 2 if name == "interleaved" else 4
    for sized in sizes(one.training, some, replace(one.choices, pipeline=(stages,))):
        ((schedule, chunks),) = one.choices.ways
        assert one.choices.runs(sized.parallel, schedule, chunks, one.training.model, one.training.engine)
        parallel = replace(sized.parallel, schedule=schedule, chunks=chunks)
        variants = [
            pipelines(replace(sized, parallel=variant), some, np.array([[0, 1]]))
            for variant in one.choices.variants(parallel)
        ]
        for first, second in itertools.permutations(variants, 2):
            if never_worse(first, second, 6).all():
                repeated = [v.take(np.zeros(table.shape[1], int)) for v in (first, second)]
                fits, times = zip(*((v.fits(table), v.iteration(table)) for v in repeated), strict=True)
                assert (fits[0] >= fits[1]).all()
                assert (times[0] <= times[1] * (1 + 1e-12)).all()
                compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ([], []),
        (["parallel.sequence_parallel=true", "parallel.tensor=2"], []),
        (["train.compile=true"], ["parallel.schedule=zb_h1"]),
        (["executor=local", "executor.rehearse=virtual"], []),
        (list(MEGATRON), ["parallel.schedule=gpipe"]),
    ],
    ids=["engine", "sequence", "compile", "rehearsal", "megatron"],
)
def test_only_what_launch_takes_is_searched(words: list[str], refused: list[str]) -> None:
    base = ["experiment=seed_a10x8", *words]
    inputs = read(base)
    tried = space(inputs.training, few(inputs.kinds, 2), inputs.choices)
    longest = {}
    for p in sorted((one.parallel for group in tried.groups for one in group.options), key=lambda p: p.pipeline):
        longest[p.schedule, p.recompute, p.sharded_optimizer] = p
    for p in longest.values():
        overrides = [f"parallel.{key}={getattr(p, key)}" for key in KEYS]
        compose([*base, *overrides, "parallel.partition=null", "cluster.groups.gpu2.count=2"])
    for word in refused:
        with pytest.raises(SearchError, match=f"{word} cannot be searched with this engine"):
            read([*base, word])


def test_what_is_given_stays() -> None:
    inputs = read(["experiment=seed_a10x8", "parallel.tensor=2", "parallel.recompute=none,full", "parallel.data=1,2,4"])
    found_sizes = {
        (p.tensor, p.data, p.recompute) for g in space_of(inputs, 8).groups for p in (g.training(0).parallel,)
    }
    assert {tensor for tensor, _, _ in found_sizes} == {2}
    assert {data for _, data, _ in found_sizes} == {1, 2, 4}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("parallel.tensor=x", "parallel.tensor=x must be a whole number, at least 1; separate several by commas"),
        ("parallel.recompute=ful", "parallel.recompute=ful must be none, selective, full, or full:N for N layers"),
        ("parallel.sharded_optimizer=1", "parallel.sharded_optimizer=1 must be true or false"),
        ("parallel.chunks=1", "parallel.chunks=1 must be at least 2, as in every interleaved schedule"),
        ("parallel.partition=24-24", "parallel.partition=24-24: the search itself finds the partition; leave it out"),
        ("parallel.node_order=gpu2*8", "the search itself finds the node order; leave it out"),
    ],
    ids=["size", "word", "flag", "chunks", "partition", "order"],
)
def test_a_value_that_is_none_is_told(word: str, message: str) -> None:
    with pytest.raises(SearchError, match=re.escape(message)):
        read(["experiment=seed_a10x8", word])


def test_sizes_that_are_given_and_impossible_are_told_with_those_that_are_not() -> None:
    inputs = read(["experiment=seed_a10x8", "parallel.tensor=3", "parallel.data=4"])
    with pytest.raises(
        SearchError, match=r"no plan for 32 GPUs has parallel.tensor=3 .*possible: tensor 1, 2, 4; data"
    ):
        space_of(inputs, 8)


def test_tensor_groups_of_latent_attention_are_refused_with_what_it_takes() -> None:
    latent = "engine.options.multi_latent_attention=true"
    inputs = read(["experiment=seed_a10x8", "engine=megatron_core", f"+{latent}", "parallel.tensor=2"])
    with pytest.raises(
        SearchError,
        match=f"parallel.tensor=2; possible: tensor 1; {latent} has no tensor groups, but takes parallel.context",
    ):
        space_of(inputs, 8)


def test_a_schedule_that_no_pipeline_can_run_is_told() -> None:
    inputs = read(["experiment=seed_a10x8", "parallel.schedule=interleaved", "parallel.pipeline=1"])
    with pytest.raises(
        SearchError, match=r"has parallel.schedule=interleaved parallel.pipeline=1: interleaved needs at least two"
    ):
        space_of(inputs, 8)


@pytest.mark.parametrize("engine", [["engine=megatron_core"], [*MEGATRON]], ids=["megatron_core", "megatron_lm"])
def test_interleaved_plans_for_megatron_have_groups_that_are_whole(engine: list[str]) -> None:
    given = ["experiment=seed_a10x8", *engine, "parallel.schedule=interleaved", "parallel.global_batch_size=24"]
    inputs = read(given)
    counts = {
        (one.parallel.pipeline, one.parallel.micro_batches)
        for one in sizes(inputs.training, few(inputs.kinds, 8), inputs.choices)
        if inputs.choices.runs(one.parallel, Schedule.interleaved, 2, one.model, one.engine)
    }
    assert {micro_batches % pipeline for pipeline, micro_batches in counts} == {0}
    assert any(micro_batches > pipeline for pipeline, micro_batches in counts)


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


def test_sets_of_nodes_have_the_sizes_and_bounds_that_each_has_by_itself() -> None:
    """Those with as many GPUs share what does not depend on their nodes."""
    inputs = read(["experiment=seed_a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=2"])
    shared = LowerBounds(inputs.kinds)
    for some in clusters(inputs.kinds):
        for uneven in (False, True):
            own = Space(inputs.training, some, inputs.choices, uneven=uneven)
            one = Space(inputs.training, some, inputs.choices, shared, uneven=uneven)
            assert (len(one), one.floor) == (len(own), own.floor)
            assert len(one) == 0 or bounds(one).tolist() == bounds(own).tolist()


@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "uneven"])
@pytest.mark.parametrize("zero", [None, 2])
def test_sets_of_nodes_that_are_bounded_together_know_what_each_knows_by_itself(zero: int | None, uneven: bool) -> None:
    """As far as it is of worth, which each has its own of."""
    inputs = read(["experiment=seed_a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=2"])
    inputs = inputs if zero is None else scattering(inputs, zero)
    sets = [some for some in clusters(inputs.kinds) if len(some) == 2]
    alone = [bounds(Space(inputs.training, some, inputs.choices, uneven=uneven)) for some in sets]
    limits = [float(np.quantile(known, 0.3)) if len(known) else np.inf for known in alone]
    shared = LowerBounds(inputs.kinds)
    spaces = [Space(inputs.training, some, inputs.choices, shared, uneven=uneven) for some in sets]
    raise_known(spaces, [partial(np.greater, limit) for limit in limits])
    for one, known, limit in zip(spaces, alone, limits, strict=True):
        assert np.array_equal(one.known < limit, known < limit)
        assert np.array_equal(one.known[known < limit], known[known < limit])
        assert (one.known <= known).all()
    assert sum(map(len, spaces)) > 100


def test_a_search_out_of_time_for_sets_of_nodes_goes_on_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it lays out once."""
    inputs = read(["experiment=seed_a100x1_a10x7", *MEGATRON, *PLAIN])
    laid_out = []

    class Noted(Space):
        def __init__(self, training: Training, kinds: Sequence[NodeKind], *more: Any, **uneven: bool) -> None:
            laid_out.append(tuple((kind.name, kind.group.count) for kind in kinds))
            super().__init__(training, kinds, *more, **uneven)

    monkeypatch.setattr("fasop.search.common_steps.Space", Noted)
    monkeypatch.setattr("fasop.search.run.SETS_S", 0.0)
    outcome = best_plans(inputs, Arguments(top=1))
    assert "It had no time" in "\n".join(outcome.summary)
    assert len(outcome.plans) == 1
    assert len(laid_out) == len(set(laid_out)) == len(clusters(inputs.kinds))


def test_nodes_whose_profile_lacks_a_tensor_size_leave_it_to_others() -> None:
    eight = [f"cluster.groups.{name}.gpus_per_node=8" for name in ("hgx", "gpu2")]
    inputs = read(["experiment=seed_a100x1_a10x7", *eight, "cluster.gpus.a100_40gb.profile=null", "parallel.tensor=8"])
    (plan,) = best_plans(inputs, Arguments(top=1)).plans
    assert plan.parallel.node_order == "hgx"


def test_nodes_that_only_slow_others_down_are_left_out() -> None:
    """An A10 node whose link is next to none; the plan without it is one that launch takes."""
    slow = ["cluster.groups.gpu2.inter_gbit_per_s=0.01", "cluster.groups.gpu2.count=2"]
    inputs = read(["experiment=seed_a100x1_a10x7", *MEGATRON, *slow, *PLAIN])
    best = Best(1)
    explore([Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)], best)
    whole = search(space(inputs.training, inputs.kinds, inputs.choices), 1).plans[0]
    plan = best.plans[0]
    assert plan.total < whole.total
    assert plan.parallel.node_order == "hgx"
    keys = [f"parallel.{key}={getattr(plan.parallel, key)}" for key in (*KEYS, "partition", "node_order")]
    assert mixed(*slow, *keys).ranks_per_node() == (4,)


@pytest.mark.parametrize("counts", [[1], [2, 3], [1, 1, 4]], ids=str)
def test_every_set_of_nodes_comes_once(counts: list[int]) -> None:
    (kind,) = kinds(A10X8)
    groups = [replace(kind, name=str(i), group=replace(kind.group, count=n)) for i, n in enumerate(counts)]
    sets = [tuple((k.name, k.group.count) for k in some) for some in clusters(groups)]
    assert len(sets) == len(set(sets)) == math.prod(n + 1 for n in counts) - 1
    assert sets[0] == tuple((str(i), n) for i, n in enumerate(counts))


def test_of_many_nodes_the_sets_differ_by_several() -> None:
    assert step([8, 8]) == 1
    assert math.prod(-(-256 // step([256] * 4)) + 1 for _ in range(4)) <= MOST_CLUSTERS + 1


def test_of_too_many_groups_those_sets_are_searched_that_leave_out_the_worst_or_some_of_one() -> None:
    assert step([1] * 9) == 1
    assert step([1] * 10) is None
    (kind,) = kinds(A10X8)
    groups = [
        replace(
            kind,
            name=f"g{number}",
            gpu=replace(kind.gpu, fp16_tflops=100.0 + number),
            group=replace(kind.group, count=2, price_per_hour=1.0 + number),
        )
        for number in range(12)
    ]
    sets = [{one.name: one.group.count for one in some} for some in clusters(groups)]
    assert len({tuple(some.items()) for some in sets}) == len(sets) <= MOST_CLUSTERS
    assert sets[0] == {kind.name: 2 for kind in groups}
    assert {kind.name: 2 for kind in groups[6:]} in sets
    assert {**{kind.name: 2 for kind in groups[7:]}, "g6": 1} in sets
    assert {kind.name: 2 for kind in groups[:5]} in sets
    for number, one in enumerate(groups):
        assert {kind.name: 2 for kind in groups if kind is not one} in sets
        assert {kind.name: 2 - (place == number) for place, kind in enumerate(groups)} in sets


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


def test_a_batch_that_nothing_divides_is_told_with_a_rounder_one() -> None:
    asked = ["experiment=seed_a10x8", "parallel.global_batch_size=1000003"]
    with pytest.raises(
        SearchError, match=r"every plan for 32 GPUs has more than 4096 micro-batches .* such as 1000448"
    ):
        best_plans(read(asked), Arguments(top=1))


def test_a_module_that_was_not_measured_is_refused_in_one_message() -> None:
    words = ["model=module", "model.code=net.py:Net", "cluster.groups.local.gpus_per_node=2"]
    with pytest.raises(
        SearchError, match=r"needs the cost of each block, but profile 'cpu' has no times of modules; m"
    ):
        read([*words, "parallel.global_batch_size=8"])
