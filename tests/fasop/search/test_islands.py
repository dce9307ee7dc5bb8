"""Plans with islands: rooms by their links, times by formula, shares by speed, and what a launch takes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise, product
from pathlib import Path

import pytest
import yaml

from conf.compose import compose
from conf.errors import TdppError
from conf.schema.values.links import PairLink
from conf.schema.values.partition import Partition
from fasop.costs.hardware import NodeKind
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import Inputs, read
from fasop.search.islands import EVERY, island_plans, parted, proposed
from fasop.search.run import best_plans
from fasop.simulation.islands import by_island
from fasop.simulation.predict import predict, predict_plan
from fasop.tables.plans import plan_yaml

CLUSTER = (
    "cluster=two_rooms", "cluster.groups.gpu2.count=1", "cluster.groups.hgx.gpus_per_node=2",
    "cluster.groups.gpu2.gpus_per_node=2",
)  # fmt: skip
WORDS = (
    *CLUSTER, "model=xl", "model.layers=4", "train.precision=bf16", "parallel.global_batch_size=8",
    "parallel.sequence_parallel=false",
)  # fmt: skip
TRAIN = ("data.prefix=none", "container=none")


def inputs(*words: str) -> Inputs:
    return read([*WORDS, *words])


def linked(rates: dict[str, float]) -> list[NodeKind]:
    """Four groups of nodes, with the bandwidth of each pair that is not their own 40 Gbit/s."""
    (kind,) = read(["cluster=a10x8", "parallel.global_batch_size=8"]).kinds
    return [
        replace(
            kind,
            name=name,
            links={pair.strip(name): PairLink(gbit_per_s=rate) for pair, rate in rates.items() if name in pair},
        )
        for name in "abcd"
    ]


@pytest.mark.parametrize(
    ("links", "every", "slow"),
    [
        ({}, ["a/b/c/d"], []),
        ({"ac": 1, "ad": 1, "bc": 1, "bd": 1}, ["a/b/c/d", "ab/cd"], ["ab/cd"]),
        ({"ad": 20, "bd": 20, "cd": 20}, ["a/b/c/d", "abc/d"], []),
        ({"ac": 1, "ad": 1, "bc": 1, "bd": 1, "cd": 5}, ["a/b/c/d", "ab/c/d", "ab/cd"], ["ab/c/d", "ab/cd"]),
    ],
    ids=["all-alike", "two-rooms", "hardly-slower", "a-room-of-two"],
)
def test_rooms_are_what_only_slower_links_join(links: dict[str, float], every: list[str], slow: list[str]) -> None:
    kinds = linked(links)

    def shown(slow_only: bool) -> list[str]:
        ways = parted(kinds, slow_only=slow_only)
        return sorted("/".join("".join(kind.name for kind in room) for room in rooms) for rooms in ways)

    assert shown(False) == every
    assert shown(True) == slow


def test_a_single_group_is_parted_into_equal_numbers_of_nodes() -> None:
    (kind,) = read(["cluster=a10x8", "cluster.groups.gpu2.count=6", "parallel.global_batch_size=8"]).kinds
    found = [[kind.group.count for (kind,) in rooms] for rooms in parted([kind])]
    assert found == [[3, 3], [2, 2, 2], [1] * 6]
    assert not [*parted([kind], slow_only=True)]


def test_the_common_step_adds_the_time_of_its_bytes_once_in_so_many_iterations() -> None:
    words = (
        *CLUSTER, "model=tiny", "model.vocab_multiple=1", *TRAIN, "parallel=single", "parallel.data=4",
        "parallel.islands=2-2", "parallel.global_batch_size=8", "parallel.partition=null",
    )  # fmt: skip
    often, seldom = (predict(compose([*words, f"train.sync_every={every}"])).iteration_s for every in (1, 10**9))
    parameters = compose([*words, "train.sync_every=1"]).model.parameters()
    each, within = 4 * parameters / 2, 4 * parameters * 8e-9 / 128
    across = 2 * 500e-6 + 2 * each / 2 * 2 * 8e-9 / 1  # of two ranks, who share the link
    assert often - seldom == pytest.approx(across + within / 2 + 10e-6, rel=0.01)
    alone = compose(
        [
            "cluster=a10x8", "cluster.groups.gpu2.count=1", "cluster.groups.gpu2.gpus_per_node=2", "model=tiny",
            "model.vocab_multiple=1", *TRAIN, "parallel=single", "parallel.data=2", "parallel.global_batch_size=4",
            "parallel.partition=null",
        ]
    )  # fmt: skip
    assert seldom == pytest.approx(predict(alone).iteration_s, rel=1e-3)  # the slower room sums over its own links


@pytest.mark.parametrize("cut", ["parallel.pipeline=1 parallel.data=4", "parallel.pipeline=2 parallel.data=2"])
def test_plans_that_islands_have_of_their_own_cost_what_the_same_plan_of_all_does(cut: str) -> None:
    words = [*CLUSTER, "model=tiny", *TRAIN, "parallel=single", *cut.split(), "parallel.global_batch_size=8"]
    layers = "4" if "pipeline=1" in cut else "1-3"
    halves = "2-2" if "data=4" in cut else "1-1"
    words += [f"parallel.islands={halves}", "train.sync_every=2"]
    once, each = (predict(compose([*words, f"parallel.partition={one}"])) for one in (layers, f"{layers}/{layers}"))
    assert each.iteration_s == pytest.approx(once.iteration_s, rel=1e-6)
    stages = [f"{stage} of island {island}" for island in range(2) for stage in range(len(once.stages))]
    assert [stage.name for stage in each.stages] == stages
    left = [stage.limit_gib - stage.memory_gib for stage in each.stages]
    for number, stage in enumerate(once.stages):
        assert min(left[number :: len(once.stages)]) == pytest.approx(stage.limit_gib - stage.memory_gib)
    lasted = [sum(stage.terms.by_name().values()) for stage in each.stages]
    assert lasted == pytest.approx([lasted[0]] * len(lasted)), "the wait for the slower island included"


def test_the_first_plan_is_near_the_best_of_all() -> None:
    searched = inputs("train.sync_every=20")
    found = island_plans(searched, 5, 1e9)
    first = found[0].training
    assert all(one.total <= other.total for one, other in pairwise(found))
    best = min(predict_plan(plan).iteration_s for plan in every_plan(searched, found[0]))
    assert found[0].total <= 1.02 * best
    assert len(first.islands) == 2


def every_plan(searched: Inputs, like: PlacedTraining) -> list[PlacedTraining]:
    """One or two stages in each room of two GPUs, with all layers in them, and all shares of one or two replicas."""
    plans, cuts = [], [(4,), *((front, 4 - front) for front in range(5))]
    for layers, size in product(product(cuts, cuts), (1, 2, 4)):
        islands = tuple(2 // len(cut) for cut in layers)
        count = 8 // size
        for fast in range(1, count):
            parts = [_dealt(part, number) for part, number in zip((fast, count - fast), islands, strict=True)]
            if min(map(min, parts)) < 1:
                continue
            plain = replace(
                like.training.parallel, tensor=1, own_plans=(), micro_batch_size=size, partition=None, islands=None,
                node_order=None,
            )  # fmt: skip
            own = tuple(
                replace(
                    plain, data=number, pipeline=len(cut), partition=cut, shares=tuple(part),
                    global_batch_size=sum(part) * size,
                )
                for number, cut, part in zip(islands, layers, parts, strict=True)
            )  # fmt: skip
            parallel = replace(
                plain, data=sum(islands), pipeline=max(map(len, layers)), islands=islands, own_plans=own,
                shares=tuple(chain(*parts)),
            )  # fmt: skip
            training = replace(like.training, parallel=parallel)
            plans.append(PlacedTraining(training=training, partition=Partition(max(layers, key=len)), nodes=like.nodes))
    return plans


def _dealt(count: int, number: int) -> list[int]:
    return [count // number + (place < count % number) for place in range(number)]


def test_each_island_takes_samples_by_its_speed() -> None:
    (plan, *_) = island_plans(inputs("train.sync_every=50", "parallel.global_batch_size=64"), 1, 1e9)
    fast, slow = by_island(plan)
    counts = [one.training.parallel.global_batch_size for one in (fast, slow)]
    assert sum(counts) == 64
    assert counts[0] > counts[1]
    times = [predict_plan(one).iteration_s for one in (fast, slow)]
    assert max(times) == plan.total
    assert min(times) > 0.9 * max(times)


def test_a_launch_takes_the_plan_as_it_is_written(tmp_path: Path) -> None:
    searched = inputs("train.sync_every=50")
    outcome = best_plans(searched, Arguments(top=1))
    file = tmp_path / "islands.yaml"
    file.write_text(plan_yaml(outcome.plans[0], "tdpp search"))
    assert yaml.safe_load(file.read_text())["islands"] == outcome.plans[0].parallel.islands
    experiment = compose([*WORDS[:-2], *TRAIN, "train.sync_every=50", f"parallel={file}"])
    assert predict(experiment).iteration_s == pytest.approx(outcome.plans[0].total, rel=1e-9)
    assert "2 islands (hgx, gpu2)" in outcome.summary[0]


def test_islands_are_proposed_where_a_slow_link_joins_rooms_with_as_few_iterations_as_pay() -> None:
    searched = inputs()
    plan = proposed(searched, 1e9, 1e9)
    assert plan is not None
    every = plan.training.sync_every
    assert every in EVERY
    times = [_every(plan, number) for number in (10**9, every, *(one for one in EVERY if one < every))]
    assert times[1] <= 1.05 * times[0] or every == EVERY[-1]
    assert all(one > 1.05 * times[0] for one in times[2:])
    assert proposed(searched, plan.total, 1e9) is None
    assert not read(["cluster=a10x8", "parallel.global_batch_size=8", "train.precision=fp16"]).may_propose_islands
    summary = best_plans(searched, Arguments(top=1, by_stage=False, leave_out=False)).summary
    assert f"With train.sync_every={every} " in summary[-1]


def _every(plan: PlacedTraining, every: int) -> float:
    return predict_plan(replace(plan, training=replace(plan.training, sync_every=every))).iteration_s


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=megatron_core"], r"engine=megatron_core .*use engine=tdpp, or train\.sync_every=null"),
        (["train.precision=fp16"], r"train\.precision=fp16 .*bf16"),
        (["parallel.sharded_optimizer=true"], r"parallel\.sharded_optimizer .*whole state.*sharded_optimizer=false"),
        (["parallel.hierarchical_reduce=true"], r"parallel\.hierarchical_reduce .*hierarchical_reduce=false"),
        (["parallel.offload=optimizer"], r"parallel\.offload .*parallel\.offload=none"),
    ],
    ids=["engine", "fp16", "sharded", "by-node", "offload"],
)
def test_what_islands_do_not_go_with_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(TdppError, match=message):
        inputs("train.sync_every=50", *words)


def test_islands_without_a_plan_are_refused() -> None:
    with pytest.raises(SearchError, match=r"train\.sync_every=50: no plan .*train\.sync_every=null"):
        best_plans(inputs("train.sync_every=50", "parallel.global_batch_size=1"), Arguments(top=1))
