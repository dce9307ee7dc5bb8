"""Where stages compute only some of their layers again, or wait for weights, proofs and dominance hold as elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fasop.costs.training import Training
from fasop.partition.dominance import never_worse
from fasop.partition.exact import proved
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.parallel_config import Recompute
from tests.support.fasop.plans import pipelines
from tests.support.fasop.random_clusters import NETWORKS, all_sizes, random_case
from tests.support.fasop.random_pipelines import all_partitions

MOST = 1000
"""Partitions of a plan that are all looked at."""


def placed(seed: int, zero: int | None, *, alike: bool) -> Iterator[tuple[Training, list[Pipelines], np.ndarray]]:
    """Some sizes of a random training on slow random nodes in one order, the pipelines of each way to compute layers
    again, and all partitions."""
    rng = np.random.default_rng(seed)
    training, kinds, choices = random_case(rng, alike=alike)
    kinds = NETWORKS[[*NETWORKS][seed % len(NETWORKS)]](rng, kinds)
    slow = float(rng.choice([1, 0.1, 0.01]))
    kinds = [replace(k, group=replace(k.group, inter_gbit_per_s=slow * k.group.inter_gbit_per_s)) for k in kinds]
    training = replace(training, parallel=replace(training.parallel, zero=zero))
    choices = replace(choices, sharded_optimizer=(zero is not None,), recompute=(Recompute.none,))
    order = rng.permutation([number for number, kind in enumerate(kinds) for _ in range(kind.group.count)])
    sizes = [*all_sizes(training, kinds, choices)]
    for sized in [sizes[number] for number in rng.permutation(len(sizes))[:4]]:
        table = all_partitions(training.model.counted, sized.parallel.virtual_stages)
        if table.shape[1] <= MOST and (zero is None or sized.parallel.data > 1):
            again = [Recompute.none, Recompute(f"full:{rng.integers(1, 4)}"), Recompute.full]
            ways = [replace(sized, parallel=replace(sized.parallel, recompute=way)) for way in again]
            yield sized, [pipelines(way, kinds, order[np.newaxis]) for way in ways], table


def seconds_of(one: Pipelines, table: np.ndarray) -> np.ndarray:
    """Of all partitions; infinite where they do not fit."""
    every = one.take(np.zeros(table.shape[1], int))
    return np.where(every.fits(table), every.iteration(table), np.inf)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("zero", [None, 2, 3])
def test_no_proof_is_above_the_best_partition(zero: int | None, alike: bool) -> None:
    count = 0
    for seed in range(16):
        for sized, ways, table in placed(seed, zero, alike=alike):
            for one in ways:
                seconds = seconds_of(one, table)
                if np.isfinite(seconds.min()):
                    count += 1
                    begin = table[:, [int(np.argmax(np.isfinite(seconds)))]]
                    bound = proved(one, sized.model.counted, begin, 40).bound
                    assert bound <= seconds.min() * (1 + 2e-6), (seed, sized.parallel)
    assert count > 25


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("zero", [None, 2, 3])
def test_what_is_never_worse_is_so_with_every_partition(zero: int | None, alike: bool) -> None:
    count = 0
    for seed in range(50):
        for sized, ways, table in placed(seed, zero, alike=alike):
            seconds = [seconds_of(one, table) for one in ways]
            for mine, own in zip(ways, seconds, strict=True):
                for theirs, other in zip(ways, seconds, strict=True):
                    if mine is not theirs and never_worse(mine, theirs, sized.model.counted)[0]:
                        count += 1
                        assert (own <= other * (1 + 1e-9)).all(), (seed, sized.parallel)
    assert count > 25
