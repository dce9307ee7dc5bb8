"""A run whose stages lie on several nodes has a plan for the nodes that a loss leaves."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.node.elastic.replan import replanned
from megatron_ext.contract.plan import Plan

ELASTIC = (
    *("elastic.enabled=true", "train.save_interval=5", "parallel=single", "parallel.micro_batch_size=1"),
    *("model=tiny", "cluster.groups.local.gpus_per_node=1"),
)
TWO_GPUS = ("cluster.groups.local.count=4", "cluster.groups.local.gpus_per_node=2")
CUTS = {
    "stages": ("parallel.pipeline=4", "cluster.groups.local.count=4"),
    "stages and replicas": ("parallel.pipeline=2", "parallel.data=2", "cluster.groups.local.count=4"),
    "stages and tensor groups": (*("parallel.pipeline=4", "parallel.tensor=2"), *TWO_GPUS),
    "replicas by stage": ("parallel.pipeline=2", "parallel.replicas=3-1", "cluster.groups.local.count=4"),
    "shares": ("parallel.pipeline=2", "parallel.data=2", "parallel.shares=8-4", "cluster.groups.local.count=4"),
}


def launched(*words: str) -> Plan:
    return make_plan(compose([*ELASTIC, "parallel.global_batch_size=12", *words]), "run")


@pytest.mark.parametrize("words", CUTS.values(), ids=CUTS.keys())
def test_any_nodes_that_are_left_have_a_plan_of_the_same_batch(words: tuple[str, ...]) -> None:
    plan = launched(*words)
    for number in range(1, 4):
        for nodes in itertools.combinations(range(4), number):
            left = replanned(plan, nodes)
            assert Plan.parse(left.as_json(), left.folder) == left
            assert {*left.used} <= {*nodes}
            assert [rank for node in left.nodes for rank in node.ranks] == [*range(len(left.ranks))]
            assert sum(left.partition) == plan.model.layers
            assert (left.micro_batch_size, left.global_batch_size) == (1, 12)
            assert sum(left.micro_batches) * left.micro_batch_size == 12
            assert replanned(left, range(4)) == plan


def test_of_unlike_nodes_the_fastest_plan_that_fits_is_taken() -> None:
    words = ["experiment=seed_a100x1_a10x7", "elastic.enabled=true", "train.save_interval=5", "model=small"]
    plan = make_plan(compose([*words, "cluster.groups.gpu2.count=3", "parallel.node_order=null", *SMALL]), "run")
    assert plan.elastic is not None
    assert plan.elastic.plans is not None
    groups = [node.group for node in plan.nodes]
    for lost in range(len(groups)):
        nodes = [number for number in range(len(groups)) if number != lost]
        there = Counter(groups[number] for number in nodes)
        left = replanned(plan, nodes)
        chosen = min((one for one in plan.elastic.plans if Counter(one.groups) <= there), key=lambda one: one.seconds)
        assert left.partition == chosen.partition
        assert sorted(left.nodes[number].group for number in left.used) == sorted(chosen.groups)


SMALL = ("parallel.pipeline=4", "parallel.data=1", "parallel.tensor=4", "parallel.partition=null")


def test_fewer_nodes_than_allowed_have_no_plan() -> None:
    plan = launched("parallel.pipeline=4", "cluster.groups.local.count=4", "elastic.min_nodes=3")
    with pytest.raises(LaunchError, match=r"no plan for the nodes that are left \(2 of local\)"):
        replanned(plan, [0, 3])


TWO = ("cluster.groups.local.count=2",)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["elastic.by=time", "elastic.epoch=100", *TWO], "elastic.by=time chooses nodes with whole replicas"),
        (["elastic.start=now", *TWO], "elastic.start=now asks Slurm which nodes are free"),
        (["adapt.rebalance=true", "parallel.data=2", "cluster.groups.local.count=4"], "adapt.rebalance=true"),
        (["parallel.schedule=pipedream", *TWO], "parallel.schedule=pipedream"),
    ],
    ids=["chosen nodes", "free nodes without Slurm", "shares that adapt", "no flush"],
)
def test_what_is_chosen_or_adapts_by_node_is_refused(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        compose([*ELASTIC, "parallel.global_batch_size=12", "parallel.pipeline=2", *words])
