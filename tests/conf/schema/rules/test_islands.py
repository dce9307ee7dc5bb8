"""Islands: what a plan says of them, and what does not go with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from fasop.costs.layers import gradients_summed
from fasop.costs.network.links import Link
from fasop.costs.training import Training
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault

WORDS = (
    "model=tiny", "cluster=a10x8", "cluster.groups.gpu2.count=2", "parallel=single", "parallel.data=8",
    "parallel.global_batch_size=16", "data.prefix=data/none", "executor=local", "container=none",
)  # fmt: skip
"""Two nodes of four GPUs."""
EVERY = "train.sync_every=50"


def plan_of(*words: str) -> Plan:
    return make_plan(compose([*WORDS, *words]), "test/islands")


def test_each_replica_is_an_island_unless_their_sizes_are_given() -> None:
    assert plan_of(EVERY).islands == [1] * 8
    content = plan_of(EVERY, "parallel.islands=4*2").as_json()
    assert (content["version"], content["islands"], content["train"]["sync_every"]) == (2, [4, 4], 50)
    layout = Plan.parse(content, Path()).layout
    assert layout.data_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.across_islands() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.replica_groups() == plan_of().layout.data_groups() == [[*range(8)]]
    assert plan_of(EVERY, "parallel.islands=3-5").layout.across_islands() == [[0, 3], [1, 4], [2, 5]]
    assert "islands" not in plan_of().as_json()


def test_the_pipelines_of_an_island_lie_together() -> None:
    words = ("parallel.pipeline=2", "parallel.data=4", "parallel.partition=null")
    assert [node.ranks for node in plan_of(*words).nodes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    plan = plan_of(*words, EVERY, "parallel.islands=2-2")
    assert [node.ranks for node in plan.nodes] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [(place.rank, place.node, place.local_rank) for place in plan.ranks[2:6]] == [
        (2, 1, 0), (3, 1, 1), (4, 0, 2), (5, 0, 3)
    ]  # fmt: skip
    assert Plan.parse(plan.as_json(), Path()).ranks == plan.ranks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.islands=4-4"], r"parallel\.islands=4-4 .*set train\.sync_every"),
        ([EVERY, "parallel.islands=4-3"], r"parallel\.islands=4-3 has 7 replicas .*data=8; .*parallel\.data=7"),
        ([EVERY, "parallel.islands=8"], r"parallel\.islands=8 is one island"),
        ([EVERY, "parallel.islands=4-x"], r"parallel\.islands=4-x is invalid: .*2-2 or 1\*4"),
        (
            [EVERY, "parallel.data=1", "parallel.tensor=4", "parallel.pipeline=2", "parallel.partition=null"],
            r"train\.sync_every=50 needs at least two islands, but parallel\.data=1",
        ),
        ([EVERY, "parallel.sharded_optimizer=true"], r"parallel\.sharded_optimizer=true .*cannot .*sync_every=50"),
        ([EVERY, "parallel.zero=1"], r"=true \(zero=1\) cannot .*sync_every=50.*=false \(zero=0\), or"),
        ([EVERY, "parallel.zero=2"], r"parallel\.zero=2 cannot .*sync_every=50.*use parallel\.zero=null, or"),
        ([EVERY, "parallel.hierarchical_reduce=true"], r"parallel\.hierarchical_reduce=true cannot .*sync_every=50"),
        ([EVERY, "parallel.schedule=pipedream"], r"parallel\.schedule=pipedream cannot .*sync_every=50"),
        (
            [EVERY, "parallel.pipeline=2", "parallel.partition=null", "parallel.replicas=5-3"],
            r"parallel\.replicas=5-3 cannot .*sync_every=50",
        ),
        (
            [EVERY, "adapt.rule=noise", "adapt.upper=64", "train.samples=1600", "train.iterations=null"],
            r"adapt\.rule=noise cannot .*sync_every=50",
        ),
        ([EVERY, "adapt.rebalance=true"], r"adapt\.rebalance=true cannot .*sync_every=50"),
        ([EVERY, "elastic.enabled=true"], r"elastic\.enabled=true cannot .*sync_every=50"),
        ([EVERY, "train.ema=0.9"], r"train\.ema=0\.9 cannot .*sync_every=50.*train\.ema=null"),
        ([EVERY, "train.precision=fp16"], r"train\.precision=fp16 cannot .*sync_every=50.*bf16"),
        ([EVERY, "engine=megatron_core"], r"engine\.kind=megatron_core cannot .*sync_every=50.*engine=tdpp"),
        (["train.outer_lr=0.5"], r"train\.outer_lr=0\.5 .*set train\.sync_every"),
        (["train.outer_momentum=0"], r"train\.outer_momentum=0 .*set train\.sync_every"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_what_does_not_go_with_islands_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose([*WORDS, *words])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"islands": [4, 3]},
        {"islands": [8]},
        {"islands": None},
        {"islands": [4, 4], "sharded_optimizer": True},
        {"islands": [4, 4], "hierarchical_stages": [0]},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    content = plan_of(EVERY, "parallel.islands=4-4").as_json()
    Plan.parse(content, Path())
    with pytest.raises(PlanFault, match="islands"):
        Plan.parse({**content, **changes}, Path())


OWN = (
    *("parallel.data=4", "parallel.islands=2-2", "parallel.pipeline=2", "parallel.tensor=1/2"),
    "parallel.partition=1-3/4",
)
"""Islands with plans of their own: two stages, or one of tensor groups."""


def test_islands_with_plans_of_their_own_lie_one_after_another() -> None:
    plan = plan_of(EVERY, *OWN, "parallel.scatter_messages=false")
    content = plan.as_json()
    assert content["island_plans"] == [
        {"pipeline": 2, "tensors": [1, 1], "partition": [1, 3]}, {"pipeline": 1, "tensors": [2], "partition": [4]}
    ]  # fmt: skip
    assert (content["partition"], content["pipeline"], [node.ranks for node in plan.nodes]) == (
        [], 2, [[0, 1, 2, 3], [4, 5, 6, 7]],
    )  # fmt: skip
    places = [(place.stage, place.dp, place.tp) for place in Plan.parse(content, Path()).ranks]
    assert places == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 3, 1)]
    assert plan.layout.data_groups() == [[0, 1], [2, 3], [4, 6], [5, 7]]
    own = plan.of_island(plan.ranks[5])
    assert (own.partition, own.tensor, own.layout.rank(0, 3, 1), own.taken_by(0, 3)) == ([4], 2, 7, plan.taken_by(0, 3))
    assert all(plan.layout.stage_dp_tp(rank) == place for rank, place in enumerate(places))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parallel.pipeline=1", r"parallel\.pipeline=1, but the islands of .* have up to 2 stages; .*pipeline=2"),
        ("parallel.partition=1-3/4/4", r"parallel\.partition=1-3/4/4 is for 3 islands, but there are 2: .*islands=2-2"),
        ("parallel.partition=1-3/", r"parallel\.partition=1-3/ is for 1 island, but there are 2: .*islands=2-2"),
        ("parallel.partition=1-3/3", r"island 1: .*partition=3 has 3 = 3 layers, but model\.layers=4"),
        ("parallel.partition=1-3/x", r"island 1: .*partition='x' is not a partition"),
        ("parallel.tensor=1/y", r"island 1: parallel\.tensor=y must be"),
        ("parallel.tensor=1-1-1/2", r"island 0: parallel\.tensor=1-1-1 is for 3 stages, but .*pipeline=2"),
        ("parallel.shares=1-2-3", r"parallel\.shares=1-2\*?-3 is for 3 replicas, but parallel\.data=4"),
        ("parallel.recompute=full:5", r"recompute=full:5 .*no stage has more than 4"),
        ("parallel.offload=activations-none", r"offload=activations-none is by stage"),
        ("parallel.zero=3-1", r"zero=3-1 is by stage"),
        ("parallel.scatter_messages=auto", r"scatter_messages=auto cannot .*use parallel\.scatter_messages=false"),
        ("parallel.replicas=2-2", r"replicas=2-2 cannot .*use parallel\.replicas=null"),
        ("parallel.tensor=2-1/2", r"= 10 ranks, but .* have 8 GPUs"),
        (
            "train.sync_every=null parallel.islands=null parallel.data=2 parallel.tensor=2/4",
            r"parallel\.partition=1-3/4 .*by island; set train\.sync_every",
        ),
        ("parallel.shares=auto", r"shares=auto cannot .*by island.*; use numbers, such as"),
        ("parallel.recompute=full-none-none", r"recompute=full-none-none is by stage"),
        (
            "parallel.chunks=2 parallel.schedule=interleaved",
            r"chunks=2 cannot .*; use parallel\.chunks=1 with parallel\.schedule",
        ),
    ],
)
def test_plans_of_islands_that_cannot_be_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose([*WORDS, EVERY, *OWN, *words.split()])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"island_plans": [{"pipeline": 2, "tensors": [1, 1], "partition": [1, 3]}]},
        {"island_plans": [{"pipeline": 2, "tensors": [1], "partition": [1, 3]}] * 2},
        {"island_plans": [{"pipeline": 2, "tensors": [1, 1], "partition": [1, 2]}] * 2},
        {"partition": [1, 3]},
        {"recompute": "full-none"},
    ],
    ids=str,
)
def test_a_plan_of_islands_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    content = plan_of(EVERY, *OWN).as_json()
    with pytest.raises(PlanFault):
        Plan.parse({**content, **changes}, Path())


def test_the_common_step_costs_its_part_of_an_iteration() -> None:
    """On a link of 1 ns a byte a ring of 4 ranks sends 3/2 of 4 bytes a parameter, and 4 of 2 ranks a quarter each."""
    link = Link(latency_s=1e-3, s_per_byte=1e-9)

    def summed(*words: str) -> Link[float]:
        return gradients_summed(link, Training.of(compose([*WORDS, *words])))

    found = summed(EVERY, "parallel.islands=4-4")
    assert found.s_per_byte == pytest.approx(4e-9 * (2 * 3 / 4 + 2 / 2 / 4 / 50))
    assert found.latency_s == pytest.approx(1e-3 * (6 + 2 / 50))
    alone = summed(EVERY)
    assert alone.s_per_byte == pytest.approx(summed().s_per_byte / 50)
