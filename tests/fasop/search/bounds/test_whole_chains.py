"""Chains that turn at any stage, in whole layers, against every partition and every order of the nodes."""

from __future__ import annotations

import numpy as np
import pytest

from conf.schema.experiment import Schedule
from fasop.search.bounds.order_bounds import OrderBounds, known
from fasop.search.bounds.whole_chains import WholeChains
from tests.fasop.search.bounds.test_order_bounds import case_of, every_order
from tests.support.cases import fewer
from tests.support.fasop.random_pipelines import all_partitions, random_pipelines

LIMITS = (1 + 1e-9, 1.1, 1.5)
"""Times the best plan: what is asked of chains depends on the limit."""
SCHEDULES = (Schedule.zb_h1, Schedule.one_f_one_b, Schedule.gpipe)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_partition_is_below_what_chains_allow_and_often_none_is_allowed_below_the_best(schedule: Schedule) -> None:
    looked_at = tight = 0
    for seed in range(fewer(60, 300)):
        rng = np.random.default_rng(seed)
        lines, layers = random_pipelines(rng, schedule)
        table = all_partitions(layers, lines.parts_count)
        for column in rng.permutation(len(lines))[:4]:
            one = lines.take(np.array([column]))
            many = one.take(np.zeros(table.shape[1], np.int64))
            best = np.where(many.fits(table), many.iteration(table), np.inf).min()
            if np.isfinite(best):
                chains = WholeChains.of_pipeline(one, layers)
                assert all(chains.may_be_below(more * best) for more in LIMITS), (seed, column)
                looked_at, tight = looked_at + 1, tight + (not chains.may_be_below(0.999 * best))
    assert tight > 0.15 * looked_at > 20


@pytest.mark.parametrize("first", range(0, fewer(10, 60), 10))
def test_no_order_of_the_nodes_is_below_what_chains_allow_all_of_them(first: int) -> None:
    found = nearer = 0
    for seed in range(first, first + 10):
        training, kinds, choices = case_of(seed)
        for options, _, seconds in every_order(training, kinds, choices):
            best = seconds.min()
            if not np.isfinite(best) or not all(known(one, kinds) for one in options):
                continue
            every = OrderBounds(options, kinds, 1.2 * best)
            some = [WholeChains.of_orders(options[0], every.most, units) for units in every.merged]
            assert all(any(one.may_be_below(more * best) for one in some) for more in LIMITS), seed
            found, nearer = found + 1, nearer + (not any(one.may_be_below(1.001 * every.least) for one in some))
    assert nearer > 0.2 * found > 2
