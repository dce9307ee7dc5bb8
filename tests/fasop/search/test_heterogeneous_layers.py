"""Searches where layers differ, as those of a T5 or of any sequence do, against trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from conf.schema.experiment import Schedule
from fasop.costs.hardware import NodeKind
from fasop.costs.training import Training
from fasop.search.closer_bounds import closer_least
from fasop.search.inputs import read
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.choices import Choices
from tests.support.cases import fewer
from tests.support.fasop.random_clusters import best_times, random_case
from tests.support.fasop.random_pipelines import FLUSHING
from tests.support.fasop.searches import floor
from tests.support.fasop.seeds import seeds

ROUNDING = 1e-9


def cases(
    count: int, schedules: Sequence[Schedule] = FLUSHING
) -> Iterator[tuple[Training, list[NodeKind], Choices, list[tuple[Training, float]]]]:
    """With the seconds of the best of all partitions and node orders, by sizes and options, where these are few."""
    for seed in seeds(count):
        training, kinds, choices = random_case(np.random.default_rng(seed), alike=False, schedules=schedules)
        if training.blocks.alike:
            continue
        if best := best_times(training, kinds, choices):
            yield training, kinds, choices, best


@pytest.mark.slow
@pytest.mark.parametrize("name", FLUSHING)
def test_no_plan_is_faster_than_the_lower_bound_of_its_sizes(name: Schedule) -> None:
    """In any node order, with any partition; the bounds are of some use, too."""
    near = []
    for _, kinds, _, best in cases(fewer(8, 20), [name]):
        for sized, seconds in best:
            least = floor(sized, kinds)
            assert least <= seconds * (1 + ROUNDING)
            near += [least / seconds] if np.isfinite(seconds) else []
    assert len(near) > 8
    assert np.mean(near) > 0.4


@pytest.mark.slow
def test_a_search_finds_the_best_of_all_sizes_orders_and_partitions() -> None:
    tried = 0
    for training, kinds, choices, best in cases(fewer(10, 30)):
        keep = Best(1)
        seen = explore([Space(training, kinds, choices)], keep)
        least = min(seconds for _, seconds in best)
        found = keep.plans[0].total if keep.plans else np.inf
        assert found == pytest.approx(least, rel=ROUNDING)
        assert seen.least <= least * (1 + ROUNDING)
        tried += 1
    assert tried > 2


@pytest.mark.slow
def test_the_closest_bound_of_few_partitions_is_the_best_of_them() -> None:
    """Chains and linear programs left a third open of pipelines of four stages and twelve layers."""
    tried = 0
    for training, kinds, choices, best in cases(fewer(10, 30)):
        if np.isfinite(least := min(seconds for _, seconds in best)):
            closer = closer_least([Space(training, kinds, choices)], 2 * least, most=10**6)
            assert closer == pytest.approx(least, rel=ROUNDING)
            tried += 1
    assert tried > 2


def test_bounds_leave_out_most_plans_of_a_t5() -> None:
    """Of 89 sizes with 8 node orders each: bounds that count no whole layers let partitions of 64 be searched."""
    inputs = read(["cluster=a100x1_a10x7", "train.precision=fp16", "model=t5-3b", "parallel.global_batch_size=128"])
    keep = Best(1)
    seen = explore([Space(inputs.training, inputs.kinds, Choices())], keep)
    assert seen.searched < 24
    assert 0.9 * keep.plans[0].total < seen.least <= keep.plans[0].total
