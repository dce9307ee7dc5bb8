"""Node orders: all where they are few, else those that moving nodes leads to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fasop.search.inputs import read
from fasop.search.order_search import Bounded, search_partitions
from fasop.search.plan import Plan
from fasop.search.search import Best, explore
from fasop.search.space import node_orders
from fasop.search.space.candidates import Space
from fasop.search.space.node_orders import MOST, OF_LAYERS, count, described, few, magnitude, neighbours, starts
from tests.support.cases import fewer as fewer_cases
from tests.support.fasop.random_clusters import best_times, random_case

NODES = st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any)
MANY = ("cluster=a100x8_a10x8", "model=xl", "train.precision=fp16", "parallel.global_batch_size=64")


@given(NODES)
@example([1, 3, 3])  # 140 orders: more than MOST, but not twice as many
def test_every_order_comes_once(nodes: list[int]) -> None:
    whole = [kind for kind, number in enumerate(nodes) for _ in range(number)]
    rows = [tuple(row) for row in node_orders.orders(nodes).tolist()]
    assert rows == sorted(set(itertools.permutations(whole)))
    assert len(rows) == count(nodes)
    assert few(nodes) == (len(rows) <= MOST)
    assert few(nodes, 20) == (len(rows) <= OF_LAYERS // 20)
    assert few(nodes, 1000) == few(nodes)
    assert magnitude(nodes) == pytest.approx(math.log10(len(rows)), abs=1e-9)


def test_a_thousand_nodes_of_a_kind_have_one_order() -> None:
    assert node_orders.orders([1000]).tolist() == [[0] * 1000]


@given(NODES, st.data())
def test_neighbours_are_orders_of_the_same_nodes(nodes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations([kind for kind, number in enumerate(nodes) for _ in range(number)]))
    found = neighbours(order).tolist()
    assert order not in found
    assert len({tuple(row) for row in found}) == len(found)
    assert all(sorted(row) == sorted(order) for row in found)


@pytest.mark.parametrize("nodes", [(3, 4), (2, 2, 2), (1, 2, 1, 2)], ids=str)
def test_moving_nodes_leads_from_any_order_to_any_other(nodes: Sequence[int]) -> None:
    first = tuple(starts(nodes)[0].tolist())
    reached, new = {first}, [first]
    while new:
        near = {tuple(row) for order in new for row in neighbours(order).tolist()}
        new = [*(near - reached)]
        reached |= near
    assert len(reached) == count(nodes)


def test_the_first_orders_keep_kinds_together_or_have_one_at_both_ends() -> None:
    found = ["".join(map(str, row)) for row in starts([4, 2]).tolist()]
    assert sorted(found) == ["000011", "000110", "001100", "011000", "100001", "110000"]
    for row in starts([256, 1, 256, 256]):
        assert np.bincount(row).tolist() == [256, 1, 256, 256]
        assert (np.diff(row) != 0).sum() <= 4


@pytest.mark.parametrize(
    ("nodes", "layers", "told"),
    [
        ([3], 48, "the one node order"),
        ([4, 4], 200, "all 70 node orders"),
        ([8, 8], 48, "some of 12,870 node orders, found by moving nodes from 12 of them"),
        ([3, 2, 3], 24, "some of 560 node orders, found by"),
        ([3, 2, 3], 12, "all 560 node orders"),
        ([8192, 8192], 1, "some of about 10^4929 node orders, found by"),
    ],
    ids=["one", "all", "some", "of-many-layers", "of-few-layers", "thousands"],
)
def test_it_is_told_which_orders_are_searched(nodes: list[int], layers: int, told: str) -> None:
    assert described(nodes, layers).startswith(told)


def best(words: Sequence[str], *counts: int) -> Plan:
    inputs = read(words)
    nodes = [
        replace(kind, group=replace(kind.group, count=number))
        for kind, number in zip(inputs.kinds, counts, strict=True)
    ]
    keep = Best(1)
    seen = explore([Space(inputs.training, nodes, inputs.choices)], keep)
    assert seen.least <= keep.plans[0].total
    return keep.plans[0]


@pytest.mark.slow
def test_moving_nodes_finds_what_all_orders_have(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*MANY, "parallel.schedule=one_f_one_b", "parallel.recompute=none"]
    moved = best(words, 5, 5).total
    monkeypatch.setattr("fasop.search.space.node_orders.MOST", 252)
    assert moved == best(words, 5, 5).total


@pytest.mark.slow
def test_a_group_that_is_split_in_two_is_found_among_thousands_of_orders() -> None:
    """Two nodes of one group at the ends: a fast link for the embedding's gradients, and a fast GPU for the head."""
    plan = best([*MANY, "parallel.schedule=one_f_one_b"], 8, 8)
    first, *_, last = plan.nodes
    assert first.name == last.name == "a100"
    inputs = read([*MANY, "parallel.schedule=one_f_one_b"])
    space = Space(inputs.training, inputs.kinds, inputs.choices)
    together = space.in_orders(np.repeat([[0, 1], [1, 0]], 8, axis=1))
    times = [
        search_partitions(Bounded.of(group))[1].min()
        for number in range(len(space))
        for group in space.built(number, together)
    ]
    assert plan.total < 0.9 * min(times)


@pytest.mark.slow
def test_moving_nodes_mostly_ends_at_the_best_of_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if even few orders were too many: how far the plans are from the best of all sizes, orders and partitions."""
    monkeypatch.setattr("fasop.search.space.node_orders.MOST", 3)
    monkeypatch.setattr("fasop.search.space.node_orders.OF_LAYERS", 0)
    longer = []
    for seed in range(fewer_cases(24, 60)):
        training, kinds, choices = random_case(np.random.default_rng(seed))
        every = best_times(training, kinds, choices)
        least = min((seconds for _, seconds in every or ()), default=math.inf)
        space, keep = Space(training, kinds, choices), Best(1)
        if not math.isfinite(least) or space.few:
            continue
        seen = explore([space], keep)
        assert seen.least <= least * (1 + 1e-9)
        longer.append(keep.plans[0].total / least if keep.plans else math.inf)
    assert len(longer) > fewer_cases(6, 15)
    assert min(longer) > 1 - 1e-9
    assert np.mean(np.array(longer) < 1 + 1e-9) > 0.9
    assert max(longer) < 1.1


def test_ten_groups_have_a_plan() -> None:
    """Whose nodes come in millions of orders."""
    inputs = read([*MANY, "parallel.schedule=one_f_one_b", "parallel.recompute=none"])
    groups = [
        replace(
            kind,
            name=f"g{number}",
            group=replace(kind.group, count=1, inter_gbit_per_s=kind.group.inter_gbit_per_s / (1 + number)),
        )
        for number, kind in enumerate([*inputs.kinds] * 5)
    ]
    assert count([1] * 10) > 10**6
    keep = Best(1)
    seen = explore([Space(inputs.training, groups, inputs.choices)], keep)
    names = (keep.plans[0].parallel.node_order or "").split("+")
    assert sorted(names) == sorted(group.name for group in groups)
    assert 0 < seen.least <= keep.plans[0].total
