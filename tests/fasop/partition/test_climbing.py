"""Compiled loops move layers, and find bounds, as numpy does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasop.compiled import climbs
from fasop.costs.arrays import Floats
from fasop.partition import baselines, bounds, local_search
from fasop.partition.baselines import amp
from fasop.partition.chains import chains_of
from fasop.partition.climbing import climb_of
from fasop.partition.local_search import bottleneck, feasible, improved
from fasop.simulation import pipelines
from fasop.simulation.linear import Again, Hidden, Linear
from fasop.simulation.pipelines import HeterogeneousReplicas, Pipelines
from tests.support.fasop.random_pipelines import random_pipelines


def longer(rng: np.random.Generator, lines: Pipelines) -> Pipelines:
    """Return the same with layers that are computed again, and with weights that passes wait for."""
    stages, parts, many = lines.stages, lines.parts_count, len(lines)
    most = rng.integers(0, 3, many)
    backward = replace(lines.backward, again=Again(most=most, layer=rng.uniform(0, 2, (parts, many))))
    if (hidden := lines.hidden) is not None:
        behind = Linear(fixed=rng.uniform(-5, 5, (stages, many)), layer=rng.uniform(-1, 3, (stages, many)))
        time = replace(hidden.time, again=Again(most=most, layer=rng.uniform(0, 2, (stages, many))))
        hidden = Hidden(time=time, last=hidden.last, behind=behind, at_turns=rng.uniform(0, 2, (stages, many)))
    return replace(lines, backward=backward, hidden=hidden)


def with_replicas(rng: np.random.Generator, lines: Pipelines) -> Pipelines:
    """Return the same, some with two other replicas, and some with one that has a micro-batch less."""
    first, second = (np.sort(rng.choice(len(lines), len(lines) // 2, replace=False)) for _ in range(2))
    twice, fewer = np.repeat(first, 2), max(1, lines.micro_batches - 1)
    other = replace(lines.take(twice), forward=lines.take(rng.permutation(twice)).forward)
    less = replace(lines.take(second), forward=lines.take(second[::-1]).forward, micro_batches=fewer)
    replicas = HeterogeneousReplicas(lines=other, of=twice), HeterogeneousReplicas(lines=less, of=second)
    return replace(lines, replicas=replicas)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_compiled_loops_move_the_layers_that_numpy_moves_to_the_last_bit(seed: int) -> None:
    assert hasattr(climbs, "Climb"), "pip install -e . builds it"
    rng = np.random.default_rng(seed)
    lines, layers = random_pipelines(rng)
    lines = longer(rng, lines) if rng.random() < 0.5 else lines
    lines = lines.take(np.nonzero(feasible(lines, layers))[0])
    if lines.parts_count > lines.stages and rng.random() < 0.5:
        lines = replace(lines, shares=rng.uniform(0, 0.4, (2, lines.parts_count, len(lines))))
    lines = lines.take(np.nonzero(lines.fits(bottleneck(lines, layers)))[0])
    if len(lines) < 2:
        return
    lines = with_replicas(rng, lines) if rng.random() < 0.5 else lines
    begin = bottleneck(lines, layers)
    worth = partial(np.greater, np.median(lines.iteration(begin)) * rng.choice([1.0, np.inf]))
    assert lines.blocking == (climb_of(lines) is None)
    found, seconds = improved(lines, begin, worth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_search, "climb_of", lambda _: None)
        by_numpy, taken = improved(lines, begin, worth)
    assert np.array_equal(found, by_numpy)
    assert np.array_equal(seconds, taken)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_compiled_loops_find_the_least_sums_that_numpy_finds(seed: int) -> None:
    assert hasattr(baselines.compiled, "least_sums"), "pip install -e . builds it"
    lines, layers = random_pipelines(np.random.default_rng(seed))
    found = amp(lines, layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "compiled", None)
        assert np.array_equal(found, amp(lines, layers))


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_compiled_loops_find_the_bounds_that_numpy_finds(seed: int) -> None:
    assert hasattr(bounds.compiled, "mean_of"), "pip install -e . builds it"
    rng = np.random.default_rng(seed)
    lines, layers = random_pipelines(rng)
    lines = longer(rng, lines) if rng.random() < 0.5 else lines

    def found() -> list[Floats]:
        chains = chains_of(lines)
        mean, below = bounds.mean_of(chains.trip.layer, chains.left, layers), lines.unhidden(layers).sums
        return [mean, bounds._mean_bound(chains, lines.mean_hop, layers), below.fixed, below.layer]

    by_loops = found()
    with pytest.MonkeyPatch.context() as patch:
        for module in (bounds, pipelines):
            patch.setattr(module, "compiled", None)
        assert all(map(np.array_equal, by_loops, found()))
