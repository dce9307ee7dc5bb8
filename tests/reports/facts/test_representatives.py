"""A page of many ranks begins with one replica and what differs from it, whatever the replicas are like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from reports.facts.representatives import MOST_SHOWN, Alike, alike, slowest_first
from reports.facts.statistics import Statistics, statistics
from tests.support.reports.constructed import Course, plan_of, timeline_of

EVEN = Course(partition=(2, 2), replicas=(20, 20), micro_batches=4, ranks_per_node=4)


def folded(course: Course, without: Sequence[int] = ()) -> tuple[Alike, Statistics]:
    """Of a run, of which some ranks have no events."""
    plan = plan_of(course)
    timeline = timeline_of(course, plan)
    timeline = replace(timeline, events=timeline.events[~timeline.events["rank"].isin(without)].reset_index(drop=True))
    figures = statistics(timeline, plan.ranks)
    return alike(figures, plan.ranks, slowest_first(figures, [one.dp for one in plan.ranks])), figures


def shown(found: Alike) -> list[int]:
    return [int(rank) for rank in np.flatnonzero(found.like < 0)]


def test_of_equal_replicas_one_is_shown():
    found, _ = folded(EVEN)
    assert shown(found) == [0, 20]
    assert found.percent == 5


def test_a_run_of_one_iteration_is_folded_though_none_is_steady():
    found, figures = folded(replace(EVEN, iterations=1, pace=lambda rank, _: 2.0 if rank == 27 else 1.0))
    assert not figures.steady.any()
    assert shown(found) == [0, 7, 20, 27]


def test_ranks_without_events_are_alike():
    found, _ = folded(EVEN, without=range(25, 40))
    assert len([rank for rank in shown(found) if rank >= 25]) == 1


def test_replicas_that_are_all_different_are_alike_within_more_so_that_few_are_shown():
    """The speeds of 40 replicas lie evenly between one and three: each stage has about 20 kinds within 5 %."""
    course = replace(EVEN, partition=(2, 2, 2), replicas=(40,) * 3, pace=lambda rank, _: 1 + rank % 40 / 20)
    found, figures = folded(course)
    assert found.percent > 5
    assert len(shown(found)) <= MOST_SHOWN
    compute = np.median(figures.spent.compute[:, figures.steady], axis=1)
    for rank, other in enumerate(found.like):
        assert other < 0 or abs(np.log(compute[rank] / compute[other])) <= np.log1p(found.percent / 100) + 1e-9


@pytest.mark.parametrize("replicas", [(24, 8), (8, 24)], ids=["24-8", "8-24"])
def test_stages_with_unequal_numbers_of_replicas_each_show_one(replicas: tuple[int, int]):
    course = Course(partition=(3, 1), replicas=replicas, micro_batches=48, schedule="pipedream", iterations=3)
    found, _ = folded(course)
    of_stage = [[rank for rank in shown(found) if (rank >= replicas[0]) == bool(stage)] for stage in range(2)]
    assert all(0 < len(ranks) <= 3 for ranks in of_stage)


def test_the_ranks_that_are_shown_are_of_few_replicas():
    """Whose pipelines are then whole, or nearly so. Each stage by itself would choose among 15 of these replicas."""

    def pace(rank: int, _: int) -> float:
        return 1 + rank % 20 / 10 + rank * 7 % 11 / 100

    found, _ = folded(replace(EVEN, partition=(2,) * 4, replicas=(20,) * 4, pace=pace))
    assert len(shown(found)) > 30
    assert len({rank % 20 for rank in shown(found)}) < 10
