"""Which schedules and which means to save memory a search tries, and that it finds the best of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from conf.compose import compose
from conf.schema.experiment import Schedule
from fasop.costs.memory.activations import kept_by_layer
from fasop.errors import SearchError
from fasop.partition.dominance import never_worse
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.search.space.candidates import sizes
from fasop.tables.plans import options, plan_yaml
from tests.support.fasop.plans import FP32, MEGATRON, pipelines
from tests.support.fasop.searches import KEYS, few, search, space, space_of


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
