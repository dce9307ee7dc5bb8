"""Layers that stages of fast partitions may have, where layers differ, against all partitions."""

from __future__ import annotations

import numpy as np
import pytest

from conf.schema.experiment import Schedule
from fasop.partition import possible_stages
from fasop.partition.possible_stages import PossibleStages, StepChains
from fasop.simulation.pipelines import Pipelines
from tests.support.cases import fewer
from tests.support.fasop.random_pipelines import all_partitions, random_pipelines
from tests.support.fasop.seeds import seeds

SCHEDULES = (Schedule.zb_h1, Schedule.one_f_one_b, Schedule.gpipe)


def test_no_partition_below_a_time_has_a_stage_that_is_not_possible_and_often_none_is_below_the_best() -> None:
    looked_at = tight = 0
    for seed in seeds(fewer(250, 3000)):
        rng = np.random.default_rng(seed)
        lines, layers = random_pipelines(rng, SCHEDULES[rng.integers(3)], kinds=int(rng.integers(1, 4)))
        table = all_partitions(layers, lines.parts_count)
        for column in rng.permutation(len(lines))[:2]:
            one = lines.take(np.array([column]))
            seconds = _seconds(one, table)
            if not np.isfinite(seconds).any():
                assert not PossibleStages.of(one).below(np.inf).any()
                continue
            possible, best = PossibleStages.of(one), seconds.min()
            for more in (1 + 1e-9, 1.1, 1.5, 3.0):
                steps = possible.below(more * best)
                assert all(_has(steps, partition) for partition in table.T[seconds < more * best * (1 - 1e-12)])
            looked_at, tight = looked_at + 1, tight + (not possible.below(0.999 * best).any())
    assert tight > 0.15 * looked_at > 20


def test_compiled_loops_leave_the_steps_that_numpy_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, some = possible_stages.compiled, 0
    if compiled is None:
        pytest.skip("there was no C compiler")
    assert hasattr(compiled, "possible_steps")  # those of an earlier version would be numpy's
    for seed in seeds(fewer(60, 600)):
        rng = np.random.default_rng(seed)
        lines, _ = random_pipelines(rng, SCHEDULES[rng.integers(3)], kinds=int(rng.integers(1, 4)))
        one = lines.take(np.array([0]))
        if not (every := PossibleStages.of(one).below(np.inf)).any():
            continue
        chains = StepChains.of(one)
        for seconds in rng.uniform(0, 3 * chains.summed.max(), 5).tolist():
            found = []
            for loops in (compiled, None):
                monkeypatch.setattr(possible_stages, "compiled", loops)
                found.append(chains.within(every, seconds))
            assert np.array_equal(*found)
            some += bool(0 < found[0].sum() < every.sum())
    assert some > 30


def _seconds(one: Pipelines, table: np.ndarray) -> np.ndarray:
    """[partitions]: infinite where they do not fit."""
    many = one.take(np.zeros(table.shape[1], np.int64))
    return np.where(many.fits(table), many.iteration(table), np.inf)


def _has(steps: np.ndarray, partition: np.ndarray) -> bool:
    """Whether each stage of a partition is among the steps."""
    ends = np.cumsum(partition)
    return bool(steps[np.arange(len(ends)), ends - partition, ends].all())
