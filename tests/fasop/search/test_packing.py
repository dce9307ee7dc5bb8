"""Packing runs onto the nodes of a cluster: the best of all there are, where those can be counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations, product

import pytest

from fasop.search.packing import Packing, Way, in_order, pack, waits_for

Runs = list[list[Way]]


def fits(placed: Sequence[tuple[float, Way]], way: Way, start: float, nodes: Sequence[int]) -> bool:
    """Whether there are nodes for one more run from `start` on."""
    moments = [start, *(begun for begun, _ in placed if start < begun < start + way.seconds)]
    return all(
        sum(other.nodes[group] for begun, other in placed if begun <= moment < begun + other.seconds) + way.nodes[group]
        <= count
        for moment in moments
        for group, count in enumerate(nodes)
    )


def soonest(order: Sequence[int], ways: Sequence[Way], nodes: Sequence[int]) -> float:
    """The end of the last run, where each one in this order starts as soon as it fits beside those before it."""
    placed: list[tuple[float, Way]] = []
    for run in order:
        ends = sorted({0.0, *(begun + other.seconds for begun, other in placed)})
        placed.append((next(end for end in ends if fits(placed, ways[run], end, nodes)), ways[run]))
    return max(begun + way.seconds for begun, way in placed)


def best_of_all(runs: Runs, nodes: Sequence[int]) -> float:
    """All ways in all orders: one of these schedules is optimal."""
    orders = list(permutations(range(len(runs))))
    return min(soonest(order, ways, nodes) for ways in product(*runs) for order in orders)


def drawn(seed: int) -> tuple[Runs, list[int]]:
    """A cluster of one or two groups, and up to four runs with up to three ways each; some of them alike."""
    rng = random.Random(seed)
    nodes = [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
    runs: Runs = []
    for _ in range(rng.randint(1, 4)):
        sets = [tuple(rng.randint(0, count) for count in nodes) for _ in range(rng.randint(1, 3))]
        sets = [some if any(some) else tuple(nodes) for some in sets]
        runs.append([Way(nodes=some, seconds=rng.choice([1, 2, 3, rng.uniform(0.5, 6)])) for some in sets])
    if rng.random() < 0.4:
        runs = [runs[0]] * len(runs)
    return runs, nodes


def check_possible(found: Packing, runs: Runs, nodes: Sequence[int]) -> None:
    """Each run has one of its ways, and no node two runs at once."""
    assert all(slot.way in ways for slot, ways in zip(found.slots, runs, strict=True))
    for slot in found.slots:
        for group, count in enumerate(nodes):
            beside = [one for one in found.slots if one.start <= slot.start + 1e-9 < one.end - 1e-9]
            assert sum(one.way.nodes[group] for one in beside) <= count


@pytest.mark.parametrize("seed", range(60))
def test_no_packing_of_a_small_sweep_ends_sooner(seed: int) -> None:
    runs, nodes = drawn(seed)
    found = pack(runs, nodes)
    check_possible(found, runs, nodes)
    assert found.seconds == pytest.approx(best_of_all(runs, nodes), rel=1e-9)
    assert found.bound == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_that_is_cut_off_says_how_far_it_may_be(seed: int) -> None:
    runs, nodes = drawn(seed)
    found = pack(runs, nodes, steps=0)
    check_possible(found, runs, nodes)
    best = best_of_all(runs, nodes)
    assert found.bound <= best * (1 + 1e-9)
    assert found.seconds >= best * (1 - 1e-9)


def test_a_large_sweep_is_packed_within_a_few_percent_of_the_bound() -> None:
    ways = [Way(nodes=(a, b), seconds=100 / (4 * a + b) ** 0.85) for a in (0, 1) for b in range(8) if a or b]
    runs = [[Way(nodes=way.nodes, seconds=way.seconds * (1 + run % 5)) for way in ways] for run in range(30)]
    found = pack(runs, (1, 7), steps=200)
    check_possible(found, runs, (1, 7))
    assert found.seconds < 1.1 * found.bound
    assert found.seconds < 0.8 * sum(min(way.seconds for way in of) for of in runs)


@pytest.mark.parametrize("seed", range(60))
def test_runs_that_start_when_those_before_them_end_keep_to_their_nodes(seed: int) -> None:
    """However long they really take: no more of them are at work than there are nodes."""
    runs, nodes = drawn(seed)
    found = pack(runs, nodes)
    waits = waits_for(found, nodes)
    assert set().union(*waits) <= set(range(len(runs)))
    rng = random.Random(seed)
    for factors in ([1.0] * len(runs), [rng.uniform(0.5, 2) for _ in runs]):
        ends: dict[int, float] = {}
        starts: dict[int, float] = {}
        for run in in_order(found):
            starts[run] = max([0.0, *(ends[other] for other in waits[run])])
            ends[run] = starts[run] + factors[run] * found.slots[run].way.seconds
        for run, start in starts.items():
            for group, count in enumerate(nodes):
                beside = [one for one in starts if starts[one] <= start + 1e-9 < ends[one] - 1e-9]
                assert sum(found.slots[one].way.nodes[group] for one in beside) <= count, run
        if factors[0] == 1.0 and len(set(factors)) == 1:
            assert max(ends.values()) <= found.seconds * (1 + 1e-9)
