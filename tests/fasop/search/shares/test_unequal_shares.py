"""Shares of replicas: the best ones, and plans that have them, against brute force."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from conf.compose import compose
from conf.schema.values.partition import Partition
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from fasop.costs.training import PlacedTraining, Training
from fasop.errors import SearchError
from fasop.search.arguments import Arguments, First
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.front_search import front
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.run import best_plans
from fasop.search.search import Best, explore
from fasop.search.shares.unequal_shares import ending_of, explore_shares, least_seconds
from fasop.search.space.candidates import Space, sizes
from fasop.search.space.choices import Choices
from fasop.simulation.iteration import Durations
from fasop.simulation.nodes import Nodes
from fasop.simulation.on_nodes import on_nodes
from fasop.simulation.predict import predict, predict_plan
from fasop.simulation.ranks.replay import StageTimes
from fasop.simulation.ranks.shares import Replica, best_shares
from fasop.simulation.replica_pipelines import by_replica
from fasop.tables.plans import plan_yaml
from megatron_ext.contract.parallel_config import Schedule
from tests.support.cases import fewer
from tests.support.fasop.random_clusters import random_case
from tests.support.fasop.random_pipelines import FLUSHING, all_partitions


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as so many numbers from 1 on."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in compositions(total - first, parts - 1))


def random_replica(rng: np.random.Generator, name: str, stages: int, chunks: int) -> Replica:
    def times() -> StageTimes:
        forward = rng.uniform(0.5, 3, chunks).tolist()
        hop = float(rng.uniform(0, 0.5))
        return StageTimes(forward=forward, backward=[2 * one for one in forward], send_forward=hop, send_backward=hop)

    optimizer = rng.uniform(0, 2, stages).tolist()
    stage_times, gradients = [times() for _ in range(stages)], rng.uniform(0, 1, stages).tolist()
    nothing = [0.0] * stages
    durations = Durations(
        times=stage_times, gradients=gradients, embedding=0.3, optimizer=optimizer, weights=nothing, blocking=False
    )
    return Replica(name, chunks, durations)


@pytest.mark.parametrize("seed", range(fewer(16, 40)))
def test_no_division_of_the_batch_takes_less(seed: int):
    rng = np.random.default_rng(seed)
    name = str(rng.choice([*FLUSHING]))
    stages, chunks = (int(rng.integers(2, 4)), 2) if name == "interleaved" else (int(rng.integers(1, 4)), 1)
    kinds = [random_replica(rng, name, stages, chunks) for _ in range(int(rng.integers(1, 4)))]
    replicas = [kinds[int(rng.integers(len(kinds)))] for _ in range(int(rng.integers(1, 5)))]
    total = int(rng.integers(len(replicas), 10))
    found = best_shares(replicas, total)
    every = {
        counts: max(one.seconds(count) for one, count in zip(replicas, counts, strict=True))
        for counts in compositions(total, len(replicas))
    }
    assert found.seconds == pytest.approx(min(every.values()), rel=1e-8)
    assert every[found.counts] == found.seconds


def with_all_shares(training: Training, kinds: list[NodeKind], rng: np.random.Generator) -> Iterator[PlacedTraining]:
    """All partitions and shares of some random sizes on an order in which every stage has nodes of all kinds."""
    stages = int(rng.choice([one for one in (1, 2) if all(kind.group.count % one == 0 for kind in kinds)]))
    gpus = sum(kind.group.count * kind.gpus for kind in kinds)
    data, count = gpus // stages, gpus // stages + 2
    order = [kind for kind in kinds for _ in range(kind.group.count // stages)] * stages
    schedule = Schedule(rng.choice(["gpipe", "one_f_one_b", "zb_h1"]))
    for shares in compositions(count, data):
        for layers in all_partitions(training.blocks.layers, stages).T.tolist():
            parallel = replace(
                training.parallel,
                tensor=1,
                data=data,
                pipeline=stages,
                micro_batch_size=1,
                global_batch_size=count,
                shares=tuple(shares),
                schedule=schedule,
                partition=tuple(layers),
                node_order=tuple(kind.name for kind in order),
            )
            placed = replace(training, parallel=parallel)
            yield PlacedTraining(training=placed, partition=Partition(tuple(layers)), nodes=order)


@pytest.mark.parametrize("seed", range(fewer(10, 24)))
def test_no_plan_with_shares_is_below_its_bound_and_none_beats_what_is_found(seed: int):
    rng = np.random.default_rng(seed)
    while True:
        training, kinds, choices = random_case(rng)
        kinds = [replace(one, gpus=1, group=replace(one.group, count=2)) for one in kinds[:2]]
        if len(kinds) == 2 and training.blocks.layers <= 4:
            break
    plans = [*with_all_shares(training, kinds, rng)]
    every = [predict_plan(plan) for plan in plans]
    seconds = [one.iteration_s for one in every]
    parallel = plans[0].training.parallel
    least = least_seconds(plans[0].training, kinds, lambda _: True)
    ending = ending_of(plans[0].training, kinds, LowerBounds(kinds))
    whole = least_seconds(plans[0].training, kinds, lambda _: True, ending)
    assert least is not None and whole == pytest.approx(least + ending, rel=1e-9)
    assert whole <= min(seconds) * (1 + 1e-9)
    sized = replace(training, parallel=replace(parallel, shares=None, partition=None, node_order=None, data=1))
    only = replace(
        choices,
        tensor=(1,),
        data=(parallel.data,),
        pipeline=(parallel.pipeline,),
        micro_batch_size=(1,),
        schedule=(parallel.schedule,),
        recompute=(parallel.recompute,),
        sharded_optimizer=(False,),
        sequence_parallel=(False,),
    )
    best = Best(1)
    explore_shares(sized, [kinds], only, best, 1e9)
    fit = [
        (one.iteration_s, len(set(plan.training.parallel.micro_batches_of)) > 1)
        for one, plan in zip(every, plans, strict=True)
        if all(stage.memory_gib <= stage.limit_gib for stage in one.stages)
    ]
    if fit and min(fit)[1]:
        (found,) = best.plans
        assert found.total == pytest.approx(min(fit)[0], rel=1e-6)
        assert found.bound <= found.total
        parts = found.parts
        assert (parts.pipeline + parts.sums + parts.embedding)[0] == pytest.approx(found.total)


SMALL = (
    *("cluster=a100x8_a10x8", "cluster.groups.a100.count=1", "cluster.groups.a10.count=1"),
    *("cluster.groups.a100.gpus_per_node=1", "cluster.groups.a10.gpus_per_node=1", "model=xl", "train.precision=fp16"),
    *("model.layers=1", "cluster.groups.a100.inter_gbit_per_s=4000", "cluster.groups.a10.inter_gbit_per_s=4000"),
    *("parallel.global_batch_size=64", "parallel.pipeline=1", "parallel.data=2"),
)


def test_a_search_finds_shares_and_launch_takes_them(tmp_path, monkeypatch):
    outcome = best_plans(read(SMALL), Arguments(leave_out=False))
    best, even = outcome.plans[0], next(plan for plan in outcome.plans if plan.parallel.shares is None)
    assert best.parallel.shares is not None
    assert best.total < 0.9 * even.total
    gain = f"{even.total / best.total - 1:.1%}"
    assert outcome.summary[0].startswith(
        f"Shares {best.parallel.shares} gain {gain}: the best plan with equal shares takes "
    )
    text = plan_yaml(best, "tdpp search")
    assert f'shares: "{best.parallel.shares}"' in text
    sizes = [word for word in SMALL if not word.startswith("parallel.")]
    given = [f"parallel.{key}={value}" for key, value in _keys(text).items()]
    experiment = compose([*sizes, "executor=local", "container=none", *given])
    assert predict(experiment).iteration_s == pytest.approx(best.total)


def _keys(text: str) -> dict[str, str]:
    pairs = (line.split(": ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value.strip('"') for key, value in pairs}


class Below:
    """Wants plans that take less than so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.plans = seconds, list[Plan]()

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        return np.asarray(bounds < self._seconds)

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        return True

    def add(self, plans: Sequence[Plan]) -> None:
        self.plans += plans


def test_shares_are_tried_though_equal_ones_leave_a_slow_replica_one_micro_batch_more() -> None:
    """Of five micro-batches one of the two slow replicas gets two, if shares are as even as they can be."""
    words = [word for word in SMALL if "layers" not in word and not word.startswith("parallel.")]
    words += ["cluster.groups.a10.count=2", "model.layers=4", "parallel.global_batch_size=15"]
    inputs = read([*words, "parallel.data=3", "parallel.pipeline=1", "parallel.micro_batch_size=3"])
    every = Below(math.inf)
    explore_shares(inputs.training, [inputs.kinds], inputs.choices, every, math.inf)
    best = min(every.plans, key=lambda plan: plan.total)
    assert best.parallel.shares == "3-1*2"
    few = Below(1.001 * best.total)
    explore_shares(inputs.training, [inputs.kinds], inputs.choices, few, math.inf)
    assert best.total in [plan.total for plan in few.plans]


def test_a_search_does_not_take_shares(tmp_path):
    with pytest.raises(SearchError, match="the search itself finds the shares; leave it out"):
        read([*SMALL, "parallel.shares=3-1"])


def test_a_front_has_plans_with_shares() -> None:
    """Of both kinds of nodes, where the slower one is nearly free."""
    priced = ("cluster.groups.a100.price_per_hour=8", "cluster.groups.a10.price_per_hour=0.1")
    inputs = read([*SMALL, *priced])
    plans = front(inputs, Arguments(pareto=First.time)).plans
    assert plans[0].parallel.shares is not None
    assert plans[0].total == pytest.approx(best_plans(inputs, Arguments()).plans[0].total)


def test_replicas_that_cannot_take_equally_many_take_one_more_or_less() -> None:
    """Three GPUs and a batch of 64: three replicas are faster than three stages."""
    words = ("cluster=a10x8", "cluster.groups.gpu2.count=1", "cluster.groups.gpu2.gpus_per_node=3", "model=xl")
    words += ("model.layers=2", "train.precision=fp16", "parallel.global_batch_size=64")
    words += ("cluster.groups.gpu2.intra_gbit_per_s=4000",)
    outcome = best_plans(read(words), Arguments(leave_out=False))
    best, even = outcome.plans[0], next(plan for plan in outcome.plans if plan.parallel.shares is None)
    assert (best.parallel.data, best.parallel.shares) == (3, "11*2-10")
    gain = f"{even.total / best.total - 1:.1%}"
    assert outcome.summary[0].startswith(f"Shares 11*2-10 gain {gain}: the best plan with equal shares takes ")
    proved = outcome.summary[-1]
    assert best.parallel.pipeline == 1 and "the first plan has the best layers per stage." in proved
    assert proved.startswith(
        "Proved: every plan with equal shares and equal stages among these combinations is slower than the first."
    )
    assert predict_plan(best).iteration_s == pytest.approx(best.total)
    only_thirds = best_plans(read([*words, "parallel.data=3"]), Arguments(leave_out=False))
    assert only_thirds.plans[0].parallel == best.parallel
    assert "equal shares" not in only_thirds.summary[-1]  # there is no such plan
    assert (
        "All plans have unequal shares, such as 11*2-10: no number of replicas divides the batch evenly."
        in only_thirds.summary
    )


@pytest.mark.parametrize("seed", range(fewer(6, 12)))
def test_uneven_sizes_are_searched_as_well_as_trying_all(seed: int) -> None:
    """Partitions and orders of every size whose replicas cannot take equally many, by the replay of each replica."""
    rng = np.random.default_rng(seed)
    while True:
        training, kinds, choices = random_case(rng)
        kinds = [replace(one, gpus=1) for one in kinds[:2]]
        every = [*sizes(training, kinds, choices, uneven=True)]
        if every and training.blocks.layers <= 4 and sum(kind.group.count for kind in kinds) <= 4:
            break
    best = Best(1)
    explore([Space(training, kinds, Choices(), uneven=True)], best)
    nodes = [number for number, kind in enumerate(kinds) for _ in range(kind.group.count)]
    orders = np.array(sorted({*permutations(nodes)}))
    fastest = np.inf
    for one in every:
        count = one.parallel.global_batch_size // one.parallel.micro_batch_size
        assert one.parallel.micro_batches == -(-count // one.parallel.data)
        table = all_partitions(training.blocks.layers, one.parallel.pipeline)
        lines = by_replica(one, Nodes(kinds, orders)).take(np.repeat(np.arange(len(orders)), table.shape[1]))
        columns = np.tile(table, (1, len(orders)))
        fastest = min(fastest, np.where(lines.fits(columns), lines.iteration(columns), np.inf).min())
    assert min((plan.total for plan in best.plans), default=np.inf) == pytest.approx(fastest)
    for plan in best.plans:
        assert predict_plan(plan).iteration_s == pytest.approx(plan.total)
        assert plan.bound <= plan.total * (1 + 1e-12)


def test_replicas_that_are_slow_on_unlike_stages_are_predicted_each_by_itself() -> None:
    """Of two replicas over two stages each has a slow GPU once: neither is as slow as both slow GPUs together."""
    words = ["cluster=a100x8_a10x8", "cluster.groups.a100.count=2", "cluster.groups.a10.count=2", "model=xl"]
    words += ["cluster.groups.a100.gpus_per_node=1", "cluster.groups.a10.gpus_per_node=1", "train.precision=fp16"]
    words += ["model.layers=4", "parallel.data=2", "parallel.pipeline=2", "parallel.global_batch_size=16"]
    words += ["parallel.micro_batch_size=1", "parallel.partition=2-2"]
    order = "parallel.node_order=a100+a10*2+a100"
    crossed = predict(compose([*words, order, "executor=local", "container=none"]))
    assert [one.kinds for one in crossed.pipelines] == [("a100", "a10"), ("a10", "a100")]
    inputs = read([word for word in words if not word.startswith("parallel.") or "global" in word])
    parallel = replace(inputs.training.parallel, data=2, pipeline=2)
    training = replace(inputs.training, parallel=parallel)
    order, layers = Nodes(inputs.kinds, np.array([[0, 1, 1, 0]])), np.array([[2], [2]])
    assert crossed.iteration_s < 0.99 * on_nodes(training, order).iteration(layers)[0]
    lines = by_replica(training, order)
    assert lines.iteration(layers)[0] == pytest.approx(crossed.iteration_s)
    for name, seconds in vars(crossed.parts).items():
        assert getattr(lines.parts(layers), name) == pytest.approx(seconds), name
    alone = [replace(one.lines, replicas=()).iteration(layers[:, [0, 0]]) for one in lines.replicas]
    assert max(map(max, alone)) == pytest.approx(crossed.iteration_s)


def test_a_search_does_not_take_replicas_by_stage_and_leaves_out_those_of_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(
        SearchError, match=r"finds the replicas; leave it out \(by_stage=true looks closer\), or measure"
    ):
        read([*SMALL, "parallel.replicas=1-2"])
    own = tmp_path / "own.yaml"
    own.write_text('tensor: 2-1\nreplicas: "1-2"\npipeline: 2\nglobal_batch_size: 8\n')
    inputs = read(["cluster=a10x8", "model=xl", "train.precision=fp16", f"parallel={own}"])
    assert inputs.training.parallel.alike
    assert inputs.training.parallel.global_batch_size == 8
