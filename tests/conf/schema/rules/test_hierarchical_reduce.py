"""Sums of gradients within nodes first: a key of plans with replicas on several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault

WORDS = (
    "model=tiny", "cluster=a10x8", "cluster.groups.gpu2.count=2", "parallel=single", "parallel.data=8",
    "parallel.global_batch_size=16", "data.prefix=data/none", "executor=local", "container=none",
)  # fmt: skip
"""Two nodes of four GPUs."""
BY_NODE = "parallel.hierarchical_reduce=true"


def plan_of(*words: str) -> Plan:
    return make_plan(compose([*WORDS, *words]), "test/by-node")


def test_a_plan_names_the_stages_and_a_rank_its_nodes_groups() -> None:
    plan = plan_of(BY_NODE)
    content = plan.as_json()
    assert content["hierarchical_stages"] == [0]
    assert Plan.parse(content, Path()).by_node == [[[0, 1, 2, 3], [4, 5, 6, 7]]] == plan.by_node
    assert "hierarchical_stages" not in plan_of().as_json()
    assert plan_of().by_node == []


def test_tensor_ranks_have_groups_of_their_own() -> None:
    plan = plan_of(BY_NODE, "parallel.tensor=2", "parallel.data=4")
    assert plan.by_node == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.tensor=4", "parallel.data=2"),
        ("parallel.pipeline=2", "parallel.data=4", "parallel.partition=null"),
        ("cluster.groups.gpu2.inter_gbit_per_s=128",),
    ],
    ids=["one-on-each", "on-one-node", "quick-links"],
)
def test_where_nothing_is_gained_a_plan_is_as_without_it(words: tuple[str, ...]) -> None:
    assert plan_of(BY_NODE, *words).as_json() == plan_of(*words).as_json()


def test_megatron_lm_refuses_it() -> None:
    words = ("engine=megatron_lm", "engine.checkout=/opt/megatron-lm", BY_NODE)
    with pytest.raises(ConfigError, match=r"parallel\.hierarchical_reduce=true: Megatron-LM .*engine=tdpp") as caught:
        compose([*WORDS, *words])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("stages", [[-1], "0", [0.5]], ids=str)
def test_a_plan_that_cannot_be_is_refused(stages: object) -> None:
    with pytest.raises(PlanFault, match="hierarchical_stages"):
        Plan.parse({**plan_of().as_json(), "hierarchical_stages": stages}, Path())
