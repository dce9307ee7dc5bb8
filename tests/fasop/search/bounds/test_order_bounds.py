"""Bounds of all node orders at once, against every order with every partition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.training import Training
from fasop.search.bounds.order_bounds import OrderBounds, known
from fasop.search.closer_bounds import closer_least
from fasop.search.space import node_orders
from fasop.search.space.candidates import Space, sizes
from fasop.search.space.choices import Choices
from fasop.simulation.nodes import Nodes
from fasop.simulation.replica_pipelines import by_replica
from tests.support.cases import fast_first, fewer
from tests.support.fasop.random_clusters import NETWORKS, random_case
from tests.support.fasop.random_pipelines import all_partitions

SHAPES = ((2, 2), (3, 2), (1, 4), (3, 3), (1, 2, 2), (2, 1, 1), (4, 2))
"""Nodes of each kind."""
MOST = 10_000
"""Partitions times orders."""


def case_of(seed: int) -> tuple[Training, Sequence[NodeKind], Choices]:
    """Nodes of one size, so that stages have parts of nodes, or several of them, and links of every speed."""
    rng = np.random.default_rng(seed)
    while True:
        training, kinds, choices = random_case(rng)
        shape, gpus = SHAPES[rng.integers(len(SHAPES))], int(rng.choice([1, 1, 2]))
        if len(kinds) < len(shape):
            continue
        slow = float(rng.choice([1.0, 0.1, 0.01]))
        kinds = [
            replace(
                kind,
                gpus=gpus,
                group=replace(kind.group, count=count, inter_gbit_per_s=slow * kind.group.inter_gbit_per_s),
            )
            for kind, count in zip(kinds, shape, strict=False)
        ]
        return training, NETWORKS[[*NETWORKS][seed % len(NETWORKS)]](rng, kinds), choices


def every_order(
    training: Training, kinds: Sequence[NodeKind], choices: Choices
) -> Iterator[tuple[list[Training], Integers, Floats]]:
    """Yields, by size and schedule, options, all orders, and [options, orders] seconds of the fastest partition."""
    orders = node_orders.orders([kind.group.count for kind in kinds])
    nodes, layers = Nodes(kinds, orders), training.blocks.layers
    for sized in sizes(training, kinds, choices):
        for schedule, chunks in choices.ways:
            if not choices.runs(sized.parallel, schedule, chunks, sized.model, sized.engine):
                continue
            parallel = replace(sized.parallel, schedule=schedule, chunks=chunks)
            table = all_partitions(layers, parallel.virtual_stages)
            if table.shape[1] * len(orders) > MOST:
                continue
            options = [replace(sized, parallel=one) for one in choices.variants(parallel)]
            seconds = []
            for one in options:
                lines = by_replica(one, nodes).take(np.repeat(np.arange(len(orders)), table.shape[1]))
                columns = np.tile(table, (1, len(orders)))
                taken = np.where(lines.fits(columns), lines.iteration(columns), np.inf)
                seconds.append(taken.reshape(len(orders), -1).min(axis=1))
            yield options, orders, np.array(seconds)


@pytest.mark.parametrize("first", range(0, fewer(12, 120), 12))
def test_no_order_with_a_plan_that_is_fast_enough_is_left_out(first: int) -> None:
    fast, listed = 0, 0
    for seed in range(first, first + 12):
        training, kinds, choices = case_of(seed)
        for options, orders, seconds in every_order(training, kinds, choices):
            best = seconds.min()
            if not all(known(one, kinds) for one in options) or not np.isfinite(best):
                continue
            for more in (1.0001, 1.05, 1.5, 5.0):
                bounds = OrderBounds(options, kinds, more * best)
                assert bounds.least <= best * (1 + 1e-9), seed
                if bounds.of_nodes:
                    found = bounds.orders(len(orders))
                    assert found is not None
                    wanted = orders[seconds.min(axis=0) < more * best]
                    assert {*map(tuple, wanted.tolist())} <= {*map(tuple, found.tolist())}, seed
                    fast, listed = fast + len(wanted), listed + len(found)
    assert 100 < fast < listed


@pytest.mark.parametrize("first", fast_first(1, product(range(0, fewer(24, 528), 8))))
def test_no_plan_is_below_the_closer_bound_of_orders_that_are_too_many_to_build(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_orders, "MOST", 1)
    monkeypatch.setattr(node_orders, "OF_LAYERS", 0)
    tried = 0
    for seed in range(first, first + 8):
        training, kinds, choices = case_of(seed)
        space = Space(training, kinds, choices)
        found = [seconds.min() for _, _, seconds in every_order(training, kinds, choices)]
        best = min(found, default=math.inf)
        if len(found) == len(space) and math.isfinite(best):
            assert not space.few
            tried += 1
            for more in (0.99, 1.0001, 1.1, 1.5):
                least = closer_least([space], more * best)
                assert min(space.least, more * best) <= least <= min(more, 1 + 1e-9) * best, seed
    assert tried
