"""Replicas on unlike GPUs share out by memory what they keep: what fits, how large the parts are, what it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.errors import ConfigError
from fasop.costs.memory.shared_state import MOST, proportions, slack
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.simulation.memory_of_stages import shards_of
from fasop.simulation.predict import planned, predict, predict_plan
from fasop.tables.plans import csv_text, launched_with, options
from launch.control.planning.plan import make_plan

CLUSTER = (
    *("cluster=a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=1", "cluster.groups.gpu2.count=1"),
    *("cluster.groups.gpu2.gpus_per_node=1", "parallel.global_batch_size=8", "train.precision=bf16"),
)
"""A GPU of 40 and one of 24 GiB."""
TOO_LARGE = ("model=llama-1b", "model.layers=28", *CLUSTER)
PLAN = ("parallel.data=2", "parallel.pipeline=1", "parallel.tensor=1", "parallel.partition=null", "data.prefix=x")
ARGS = Arguments(top=3, leave_out=False, by_stage=False)


@given(st.lists(st.floats(0.0, 1e11), min_size=1, max_size=40))
def test_parts_are_in_proportion_to_rooms(rooms: list[float]) -> None:
    parts = proportions(rooms)
    assert min(parts) >= 1
    assert sum(parts) <= max(MOST, len(rooms)) + len(rooms)
    if max(rooms) > 0:
        for part, room in zip(parts, rooms, strict=True):
            assert part / max(parts) == pytest.approx(room / max(rooms), abs=slack(len(rooms)))


def test_gpus_alike_keep_equal_parts() -> None:
    assert proportions([3.5e9] * 5) == [1] * 5
    words = [
        "model=llama-1b",
        "cluster=a10x8",
        *PLAN,
        "parallel.data=32",
        "parallel.micro_batch_size=1",
        "parallel.global_batch_size=32",
    ]
    alike = compose([*words, "parallel.zero=2", "parallel.shards=memory", "parallel.node_order=null"])
    equal = compose([*words, "parallel.zero=2", "parallel.node_order=null"])
    assert make_plan(alike, "x").shards is None
    one, other = predict(alike), predict(equal)
    assert one.iteration_s == other.iteration_s
    assert [stage.memory_gib for stage in one.stages] == [stage.memory_gib for stage in other.stages]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stage_that_does_not_fit_in_equal_parts_fits_by_memory(zero: int) -> None:
    words = [*TOO_LARGE, *PLAN, f"parallel.zero={zero}", "parallel.recompute=full", "parallel.node_order=hgx+gpu2"]
    words += ["model.layers=32"] if zero == 2 else ["model.layers=40"] if zero == 3 else []
    (equal,) = predict(compose(words)).stages
    (unequal,) = predict(compose([*words, "parallel.shards=memory"])).stages
    assert equal.memory_gib > equal.limit_gib
    assert all(one.left_gib > 0 for one in unequal.held)
    assert [one.kind.name for one in unequal.held] == ["gpu2", "hgx"]
    left = [one.left_gib / one.kind.gpu.memory_gib for one in unequal.held]
    assert max(left) < 0.25
    plan = make_plan(compose([*words, "parallel.shards=memory"]), "x")
    assert plan.shards is not None
    assert plan.shards == [[one.proportion for one in unequal.held][::-1]]


def test_what_is_left_of_all_gpus_is_in_proportion_to_their_parts() -> None:
    words = [*TOO_LARGE, *PLAN, "parallel.zero=2", "parallel.recompute=full", "parallel.shards=memory"]
    (stage,) = predict(compose([*words, "parallel.node_order=null"])).stages
    small, large = stage.held
    shared = small.memory.optimizer.of(28) + small.memory.gradients.of(28)
    beside = {
        one.kind.name: one.gib - (one.memory.optimizer.of(28) + one.memory.gradients.of(28)) / 2**30
        for one in stage.held
    }
    rooms = [one.kind.gpu.memory_gib - beside[one.kind.name] for one in stage.held]
    assert small.proportion / large.proportion == pytest.approx(rooms[0] / rooms[1], rel=0.01)
    assert shared > 0


def test_a_search_offers_plans_that_fit_thanks_to_it() -> None:
    words = [*TOO_LARGE, "parallel.data=2", "parallel.zero=1", "parallel.offload=none"]
    found = best_plans(read(words), ARGS)
    assert best_none([*words, "parallel.shards=equal"])
    for plan in found.plans:
        assert plan.parallel.shards == "memory"
        predicted = predict_plan(plan)
        assert all(one.left_gib > 0 for stage in predicted.stages for one in stage.held)
        assert plan.total == pytest.approx(predicted.iteration_s, rel=1e-9)
        assert "parts by memory" in options(plan.parallel)
    first = found.plans[0]
    assert launched_with(first, {})["parallel.shards"] == "memory"
    assert any("replicas keep by memory of stage 0" in line for line in found.summary)
    launched = compose([*TOO_LARGE, "data.prefix=x", *(f"{k}={v}" for k, v in launched_with(first, {}).items())])
    assert shards_of(planned(launched)) == shards_of(first)
    assert ",memory," in csv_text(found.plans, read(words).run)


def best_none(words: list[str]) -> bool:
    with pytest.raises(SearchError, match="does not fit"):
        best_plans(read(words), ARGS)
    return True


@pytest.mark.parametrize("layers", [8, 23, 26, 29])
@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_whatever_a_search_finds_by_memory_fits(zero: str, layers: int) -> None:
    words = [*TOO_LARGE, f"model.layers={layers}", f"parallel.zero={zero}", "parallel.shards=memory"]
    for plan in best_plans(read(words), Arguments(top=10, by_stage=False)).plans:
        predicted = predict_plan(plan)
        assert all(stage.memory_gib <= stage.limit_gib for stage in predicted.stages)
        assert all(one.left_gib >= 0 for stage in predicted.stages for one in stage.held)


@pytest.mark.parametrize("model", ["tiny", "t5-tiny"])
def test_layers_that_leave_nothing_on_a_gpu_but_what_replicas_share_fit(model: str) -> None:
    """Numbers of layers that take no byte were infinite, and plans with such were taken for too large."""
    words = [*CLUSTER, f"model={model}", "parallel.zero=3", "parallel.shards=memory", "parallel.offload=activations"]
    predicted = predict_plan(best_plans(read([*words, "parallel.data=2"]), ARGS).plans[0])
    assert all(one.left_gib >= 0 for stage in predicted.stages for one in stage.held)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel.zero=0"], "parallel.shards=memory needs parallel.zero of at least 1"),
        (
            ["parallel.zero=1", "parallel.hierarchical_reduce=true"],
            "cannot be combined with parallel.hierarchical_reduce",
        ),
        (["parallel.zero=1", "elastic.enabled=true"], "cannot be combined with elastic.enabled=true"),
        (["parallel.zero=1", "adapt.rebalance=true"], "cannot be combined with adapt.rebalance=true"),
        (["parallel.zero=1", "engine=megatron_core"], "parallel.shards=memory must be equal with engine=megatron_core"),
        (["parallel.zero=1", "engine=megatron_lm", "engine.checkout=/tmp"], "parallel.shards=memory: Megatron-LM"),
    ],
    ids=lambda one: one[-1].partition("=")[0] if isinstance(one, list) else "",
)
def test_what_does_not_go_with_it_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["model=tiny", "parallel.data=2", "parallel.shards=memory", *words])
