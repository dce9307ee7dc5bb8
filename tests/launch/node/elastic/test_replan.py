"""The plan of an elastic run with other nodes."""

from __future__ import annotations

import itertools

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from launch.files.records import Start
from launch.node.elastic.replan import of_start, replanned, with_measured
from megatron_ext.contract.adaptive.shares import Way, known_of, longest, weights_of
from megatron_ext.contract.plan import Plan

SETTINGS = (
    "elastic.enabled=true",
    "parallel=single",
    "parallel.data=6",
    "parallel.global_batch_size=24",
    "parallel.micro_batch_size=1",
    "parallel.shares=6*2-3*4",
    "cluster.groups.local.count=3",
    "cluster.groups.local.gpus_per_node=2",
)
ELASTIC = (*SETTINGS, "train.save_interval=5")


def launched_with(*words: str) -> Plan:
    return make_plan(compose([*ELASTIC, *words]), "run")


def launched() -> Plan:
    return launched_with()


@pytest.mark.parametrize("nodes", [set(of) for n in (1, 2, 3) for of in itertools.combinations(range(3), n)], ids=str)
def test_any_nodes_share_the_same_batch_as_fast_as_can_be(nodes: set[int]) -> None:
    """The first node is twice as fast as the others."""
    plan = replanned(launched(), nodes)
    assert Plan.parse(plan.as_json(), plan.folder) == plan
    assert plan.used == sorted(nodes)
    assert sum(plan.micro_batches) * plan.micro_batch_size == plan.global_batch_size == 24
    seconds = [0.5 if place.node == 0 else 1.0 for place in plan.ranks]
    count = len(plan.ranks)
    if count <= 4:  # of six replicas there are too many divisions to look at
        divided = (shares for shares in itertools.product(range(1, 25), repeat=count - 1) if sum(shares) < 24)
        best = min(longest(seconds, [*shares, 24 - sum(shares)]) for shares in divided)
        assert longest(seconds, plan.micro_batches) == best


def test_with_all_nodes_it_is_the_launched_one_again() -> None:
    assert replanned(replanned(launched(), {1}), {0, 1, 2}) == launched()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        pytest.param("train.checkpoint=false", "train.checkpoint=false", id="no-checkpoints"),
        pytest.param("train.save_interval=null", "train.save_interval=null", id="one-checkpoint-at-the-end"),
        pytest.param("elastic.min_nodes=4", "elastic.min_nodes=4", id="more-than-there-are"),
        pytest.param("cluster.groups.local.count=1", "elastic.enabled=true", id="one-node"),
    ],
)
def test_a_plan_that_cannot_lose_a_node_is_refused(override: str, named: str) -> None:
    more = {"cluster.groups.local.count=1": ["parallel.data=2", "parallel.shares=2-1"]}
    more["train.checkpoint=false"] = ["train.save_interval=null"]
    with pytest.raises(ConfigError, match=named):
        compose([*ELASTIC, override, *more.get(override, [])])


def test_a_heterogeneous_job_is_refused() -> None:
    """Slurm ends all of it when one of its groups has no node left."""
    there = ["executor=slurm", "cluster=a100x1_a10x7", "parallel.node_order=hgx+gpu2*2", "parallel.data=12"]
    settings = [word for word in ELASTIC if not word.startswith(("cluster", "parallel.data", "parallel.shares"))]
    with pytest.raises(ConfigError, match=r"executor\.het=hetjob"):
        compose([*settings, *there, "executor.het=hetjob"])


def test_streams_and_what_replicas_may_have_follow_their_nodes() -> None:
    """Shares are such that rounds are full where that is as fast."""
    plan = launched_with("parallel.streams=2*2-1*4", "adapt.rebalance=true", "adapt.micro_batch_sizes=[2]")
    content = plan.as_json()
    content["elastic"]["micro_batch_sizes"] = [[1, 2], [1, 2], [1], [1], [1, 2], [1]]
    found = replanned(Plan.parse(content, plan.folder), {0, 2})
    assert Plan.parse(found.as_json(), found.folder) == found
    assert found.streams == [2, 2, 1, 1]
    assert found.adapt is not None
    assert found.adapt.micro_batch_sizes == [[1, 2], [1, 2], [1, 2], [1]]
    assert found.micro_batches == [8, 8, 4, 4]
    assert replanned(found, range(3)).streams == plan.streams
    assert replanned(found, {1}).micro_batches == [12, 12]


def test_a_new_plan_goes_by_measured_times() -> None:
    """The first node was thought twice as fast; it is four times as fast, and the one that has measured nothing is
    taken to be as much faster than predicted as its group's others, by their median. Times in several ways are kept."""
    plan = launched_with("adapt.rebalance=true", "adapt.micro_batch_sizes=[2]")
    two = replanned(plan, {0, 1})
    line = {
        "start": "0.0",
        "shares_before": [6, 6, 3, 3],
        "micro_batch_sizes_before": [1] * 4,
        "streams_before": [1] * 4,
    }
    later = line | {"micro_batch_sizes_before": [1, 1, 1, 2], "micro_batch_ms": [10.0, 10.0, 40.0, 60.0]}
    first, other = (
        line | {"micro_batch_ms": [20.0, 20.0, 80.0, 80.0]},
        line | {"start": "0.1", "micro_batch_ms": [9.0] * 4},
    )
    lines = [first, other, {"start": "0.0", "nodes": ["a"]}, later]
    measured = with_measured(two, of_start(lines, Start(0, 0)))
    assert measured.elastic is not None
    assert measured.elastic.times is not None
    assert measured.elastic.weights == pytest.approx([100.0, 100.0, 25.0, 12.5, 100 / 3, 100 / 3])
    kept = [[(one.size, one.seconds) for one in times] for times in measured.elastic.times]
    assert kept == [[(1, 0.01)], [(1, 0.01)], [(1, 0.04)], [(1, 0.08), (2, 0.06)], [], []]
    after = replanned(measured, {0, 2})
    assert Plan.parse(after.as_json(), after.folder) == after
    assert after.micro_batches == [9, 9, 3, 3]
    assert known_of(after) == [{Way(1): 0.01}, {Way(1): 0.01}, {}, {}]
    assert weights_of(after) == pytest.approx([100.0, 100.0, 100 / 3, 100 / 3])
    assert with_measured(after, []).elastic == after.elastic
    fixed = replanned(launched(), {0, 1})
    assert with_measured(fixed, of_start(lines, Start(0, 0))) == fixed  # its shares are as given
