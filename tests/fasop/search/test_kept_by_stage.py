"""Where nothing fits otherwise, a search shares out gradients and weights, and each stage only as far as it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from conf.compose import compose
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.run import best_plans
from fasop.simulation.predict import predict, predict_plan
from fasop.tables.plans import launched_with
from megatron_ext.contract.parallel_config import Offload

WORDS = ("cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "parallel.global_batch_size=8")
BF16 = ("train.precision=bf16", "parallel.recompute=full", "parallel.tensor=1", "parallel.schedule=one_f_one_b")
ONE_STAGE = (*WORDS, *BF16, "parallel.data=4", "parallel.pipeline=1", "parallel.micro_batch_size=1")
TWO_STAGES = (*WORDS, *BF16, "parallel.data=2", "parallel.pipeline=2", "parallel.micro_batch_size=1")
ARGS = Arguments(top=1, by_stage=False)


def with_memory(gib: float) -> str:
    return f"cluster.gpus.a10.memory_gib={gib}"


def test_more_is_shared_out_the_less_memory_there_is() -> None:
    found = [best_plans(read([*ONE_STAGE, with_memory(gib)]), ARGS).plans[0] for gib in (22.2, 14.5)]
    assert [plan.parallel.zero for plan in found] == [None, 3]
    for gib, plan in zip((22.2, 14.5), found, strict=True):
        assert plan.parallel.offload == "none"
        words = [f"{key}={value}" for key, value in launched_with(plan, {}).items()]
        launched = predict(compose([*ONE_STAGE[:3], "train.precision=bf16", with_memory(gib), *words]))
        assert launched.iteration_s == pytest.approx(plan.total, rel=1e-9)
        assert all(stage.memory_gib <= gib for stage in launched.stages)


@pytest.mark.parametrize("given", ["parallel.zero=1", "parallel.sharded_optimizer=true"])
def test_what_the_command_line_says_stays(given: str) -> None:
    with pytest.raises(SearchError, match="does not fit"):
        best_plans(read([*ONE_STAGE, with_memory(10.0), given, "parallel.offload=none"]), ARGS)


def kept_in_every_way(plan: Plan) -> Iterator[Plan]:
    """With each stage keeping each that the plan's does, or more on its GPU."""
    parallel = plan.training.parallel
    away = parallel.any_offload
    offloads = [one for one in Offload if Offload.together([one, away]) is away]
    zero = parallel.zero if isinstance(parallel.zero, int) else int(parallel.sharded_optimizer)
    ways = [*product(range(zero + 1) if zero > 1 else [zero], offloads)]
    for kept in product(ways, repeat=parallel.pipeline):
        zeros, kinds = tuple(zero for zero, _ in kept), tuple(one for _, one in kept)
        some = replace(parallel, sharded_optimizer=max(zeros) > 0, zero=zeros, offload=kinds)
        yield replace(plan, training=replace(plan.training, parallel=some))


@pytest.mark.parametrize("gib", [6.5, 7.0, 8.0, 9.0, 11.0])
def test_stages_keep_what_is_fastest_of_all_that_fits(gib: float) -> None:
    """Against every way that both stages can have."""
    found = best_plans(read([*TWO_STAGES, with_memory(gib)]), Arguments(top=2, by_stage=False)).plans
    whole = next(plan for plan in found if plan.training.parallel.alike)
    every = [predict_plan(plan) for plan in kept_in_every_way(whole)]
    best = min(one.iteration_s for one in every if all(stage.memory_gib <= gib for stage in one.stages))
    assert best * (1 - 1e-9) <= found[0].total <= 1.002 * best
    assert found[0].bound <= best * (1 + 1e-9) or found[0] is whole
    assert all(stage.memory_gib <= gib for stage in predict_plan(found[0]).stages)
    words = [f"{key}={value}" for key, value in launched_with(found[0], {}).items()]
    launched = predict(compose([*WORDS[:3], "train.precision=bf16", with_memory(gib), *words]))
    assert launched.iteration_s == pytest.approx(found[0].total, rel=1e-9)


def test_stages_keep_unlike_things_where_that_is_faster() -> None:
    found = best_plans(read([*TWO_STAGES, with_memory(6.5), "parallel.recompute=none,full"]), ARGS)
    assert not found.plans[0].training.parallel.alike
    assert any("gains" in line and "the same in all stages" in line for line in found.summary)
