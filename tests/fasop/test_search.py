"""A search finds what trying everything finds, and says what would help where there is nothing to find."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import Experiment
from fasop.baselines import minmax
from fasop.candidates import sizes, space
from fasop.errors import SearchError
from fasop.hardware import NodeKind
from fasop.inputs import read
from fasop.orders import MOST, count, orders, searched
from fasop.partition import bottleneck, improved
from fasop.pipelines import pipelines
from fasop.placement import place
from fasop.search import Result, search, start
from fasop.training import Training
from tests.fasop.plans import MEGATRON, experiment, kinds, mixed

A10X8, MIXED = experiment(*MEGATRON), mixed(*MEGATRON)


def found(one: Experiment, most: int = 10, counts: Sequence[int] | None = None) -> Result:
    return search(space(Training.of(one), nodes(one, counts)), most)


def nodes(one: Experiment, counts: Sequence[int] | None = None) -> Sequence[NodeKind]:
    return kinds(one) if counts is None else few(kinds(one), *counts)


def few(whole: Sequence[NodeKind], *counts: int) -> Sequence[NodeKind]:
    return [replace(k, group=replace(k.group, count=n)) for k, n in zip(whole, counts, strict=True)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any))
def test_every_order_comes_once(numbers: list[int]) -> None:
    whole = [kind for kind, number in enumerate(numbers) for _ in range(number)]
    rows = [tuple(row) for row in orders(numbers).tolist()]
    assert rows == sorted(set(itertools.permutations(whole)))
    assert len(rows) == count(numbers)


def test_too_many_orders_are_searched_in_blocks_and_that_is_told() -> None:
    numbers = [256] * 4
    assert count(numbers) > MOST
    assert orders(numbers).shape == (24, 1024)
    assert searched(numbers).startswith("the 24 node orders that keep nodes of a group together, of about 10^6")


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
    whole = found(MIXED, 10_000, counts=[1, 3])
    assert whole.searched == whole.candidates
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


def test_what_fits_nowhere_says_what_would_do() -> None:
    one = read(["cluster=a10x8", "model=13b", "parallel.global_batch_size=64"])
    with pytest.raises(SearchError) as told:
        space(one.training, few(one.kinds, 1))
    text = str(told.value)
    assert (
        "model=13b with parallel.global_batch_size=64 fits into the memory of cluster.gpus (A10 22.2 GiB) with no"
        in text
    )
    percent, times = re.findall(r"(\d+) % of this memory on every GPU; or (\d+) times as many nodes", text)[0]
    (a10,) = few(one.kinds, 1)
    larger = replace(a10, gpu=replace(a10.gpu, memory_gib=22.2 * int(percent) / 100))
    assert space(one.training, [larger]).groups
    assert space(one.training, few(one.kinds, int(times))).groups


def test_a_batch_that_no_replicas_divide_is_told_with_near_ones() -> None:
    one = read(["cluster=a10x8", "model=tiny", "parallel.micro_batch_size=1", "parallel.global_batch_size=6"])
    with pytest.raises(
        SearchError,
        match=r"=6 is divisible by no number of replicas that 256 GPUs .*: 16, 32, .*; nearest that are: 16",
    ):
        space(one.training, few(one.kinds, 64))


def test_tensor_sizes_that_suit_nobody_are_told() -> None:
    one = read(["cluster=a10x8", "model=xl", "parallel.global_batch_size=64", "train.precision=fp16"])
    (a10,) = one.kinds
    assert a10.profile is not None
    only8 = replace(a10.profile, costs=[replace(a10.profile.costs[0], tensor=8)])
    with pytest.raises(
        SearchError, match=r"no tensor size suits .*gpu2: 4 GPUs a node, profile a10 with tensor sizes 8"
    ):
        space(one.training, [replace(a10, profile=only8)])
