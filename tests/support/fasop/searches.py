"""Searches and bounds of single spaces, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from conf.schema.experiment import Experiment
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from fasop.costs.training import Training
from fasop.search.bounds.gpu_classes import Way
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.findings.no_plan import why_no_plan
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.choices import Choices
from fasop.simulation.predict import predict_plan
from tests.support.cases import fewer
from tests.support.fasop.plans import MEGATRON, experiment, kinds, mixed
from tests.support.fasop.random_clusters import best_times, random_case
from tests.support.fasop.seeds import seeds

KEYS = (
    *("tensor", "data", "pipeline", "micro_batch_size", "schedule", "chunks"),
    *("recompute", "sharded_optimizer", "sequence_parallel"),
)
PLAIN = ("parallel.schedule=one_f_one_b", "parallel.recompute=none", "parallel.sharded_optimizer=false")
A10X8, MIXED = experiment(*MEGATRON), mixed(*MEGATRON)


def space(training: Training, kinds: Sequence[NodeKind], choices: Choices | None = None) -> Space:
    """All nodes of these kinds; without `choices` with every size, and the options of `training`.

    Raises:
        SearchError: nothing fits.
    """
    parallel = training.parallel
    choices = choices or Choices(
        schedule=(parallel.schedule,),
        chunks=(max(2, parallel.chunks),),
        recompute=(parallel.recompute,),
        sharded_optimizer=(parallel.sharded_optimizer,),
        sequence_parallel=(parallel.sequence_parallel,),
    )
    found = Space(training, kinds, choices)
    if not any(True for _ in found.groups):
        raise why_no_plan(training, kinds, choices)
    return found


def search(of: Space, most: int) -> Best:
    best = Best(most)
    explore([of], best)
    return best


def bounds(of: Space) -> Floats:
    """What is known of all numbers once chains of waits are looked at."""
    of.raise_known(lambda seconds: seconds < np.inf)
    return of.known


def floor(training: Training, kinds: Sequence[NodeKind]) -> float:
    """Seconds below which no order of these nodes and no partition gets an iteration, proved."""
    parallel = training.parallel
    way = Way.of(parallel)
    return float(LowerBounds(kinds).of([training], way, kinds)[0])


def against_brute_force(
    cases: int, more: int, changed: Callable[[np.random.Generator, list[NodeKind]], list[NodeKind]]
) -> list[tuple[Plan, Plan]]:
    """The best plans of random clusters with `changed` nodes and without, the former held against brute force.

    Of all sizes, orders and partitions none is quicker or below its bound, and the replay agrees.
    """
    found = []
    for seed in seeds(fewer(cases, more)):
        rng = np.random.default_rng(seed)
        training, nodes, choices = random_case(rng)
        other = changed(rng, nodes)
        best = best_times(training, other, choices)
        if not best or not np.isfinite(least := min(seconds for _, seconds in best)):
            continue
        keep, plain = Best(1), Best(1)
        explore([Space(training, other, choices)], keep)
        explore([Space(training, nodes, choices)], plain)
        plan = keep.plans[0]
        assert plan.total == pytest.approx(least, rel=1e-9)
        assert all(floor(sized, other) <= seconds * (1 + 1e-9) for sized, seconds in best)
        assert predict_plan(plan).iteration_s == pytest.approx(plan.total, rel=1e-9)
        found.append((plan, plain.plans[0]))
    assert len(found) > 5
    return found


def found(one: Experiment, most: int = 10, counts: Sequence[int] | None = None) -> Best:
    return search(space(Training.of(one), nodes(one, counts)), most)


def nodes(one: Experiment, counts: Sequence[int] | None = None) -> Sequence[NodeKind]:
    return kinds(one) if counts is None else few(kinds(one), *counts)


def space_of(inputs: Inputs, *counts: int) -> Space:
    return space(inputs.training, few(inputs.kinds, *counts), inputs.choices)


def few(whole: Sequence[NodeKind], *counts: int) -> Sequence[NodeKind]:
    return [replace(k, group=replace(k.group, count=n)) for k, n in zip(whole, counts, strict=True)]
