"""Lengths, shares and bubbles are what their definitions say."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.schedule import Kind, schedule
from reports.events import EVENT, NAMES, Timeline
from reports.statistics import ideal_bubble, stage_times, statistics

MS = 1_000_000


def timeline(*events: tuple[int, str, int, int, int]) -> Timeline:
    """From (rank, name, iteration, start ms, end ms)."""
    rows = [(rank, NAMES.index(name), 0, n, -1, -1, start * MS, end * MS) for rank, name, n, start, end in events]
    return Timeline(np.sort(np.array(rows, EVENT), order=["rank", "start_ns"]), NAMES, {}, 0, ())


def one_iteration(number: int, start: int) -> list[tuple[int, str, int, int, int]]:
    """100 ms: rank 0 computes 60 ms of them, rank 1 30 ms."""
    return [
        (0, "forward-compute", number, start, start + 20),
        (0, "backward-recv", number, start + 20, start + 50),
        (0, "backward-compute", number, start + 50, start + 90),
        (0, "optimizer", number, start + 90, start + 98),
        (0, "optimizer-clip-main-grad", number, start + 90, start + 92),
        (1, "forward-recv", number, start + 1, start + 20),
        (1, "forward-compute", number, start + 20, start + 30),
        (1, "backward-compute", number, start + 30, start + 50),
        (1, "grads-all-reduce", number, start + 50, start + 100),
    ]


def whole_run() -> list[tuple[int, str, int, int, int]]:
    """Four iterations."""
    return [event for number, start in ((1, 0), (2, 200), (3, 300), (4, 400)) for event in one_iteration(number, start)]


RUN = timeline(*whole_run())


def test_length_is_from_the_first_start_to_the_last_end_over_all_ranks():
    figures = statistics(RUN, 2)
    assert figures.iterations.tolist() == [1, 2, 3, 4]
    assert figures.length_ns.tolist() == [100 * MS] * 4


def test_compute_share_is_forward_and_backward_over_the_length():
    assert statistics(RUN, 2).compute_share == pytest.approx(np.array([[0.6] * 4, [0.3] * 4]))


def overlapping() -> Timeline:
    """One iteration begins every 80 ms, while rank 1 is still at the one before."""
    return timeline(*(event for number in (1, 2, 3) for event in one_iteration(number, 80 * number)))


def test_time_that_two_iterations_share_counts_once_in_the_bubble():
    figures = statistics(overlapping(), 2)
    assert figures.length_ns.tolist() == [100 * MS] * 3
    assert figures.period_ns.tolist() == [100 * MS, 80 * MS, 80 * MS]
    assert figures.usual_period_ms == 80
    assert figures.bubble == pytest.approx(1 - (60 / 80 + 30 / 80) / 2)


def test_what_passes_between_two_iterations_is_in_no_period():
    assert statistics(RUN, 2).period_ns.tolist() == [100 * MS] * 4


def test_an_iteration_that_cannot_end_before_another_has_no_negative_bubble():
    figures = statistics(timeline(*one_iteration(1, 500), *one_iteration(2, 0)), 2)
    assert figures.bubble == pytest.approx(1 - (1 + 0.5) / 2)


def test_a_rank_without_events_has_no_share_and_does_not_count_in_the_bubble():
    figures = statistics(RUN, 3)
    assert np.isnan(figures.compute_share[2]).all()
    assert figures.bubble == pytest.approx(1 - 0.45)


def test_the_first_iteration_is_not_steady():
    assert statistics(RUN, 2).steady.tolist() == [False, True, True, True]


@pytest.mark.parametrize("lost", [1, 4], ids=["one-event", "most-of-a-rank"])
def test_an_iteration_that_lacks_events_is_not_steady(lost: int):
    assert statistics(timeline(*whole_run()[:-lost]), 2).steady.tolist() == [False, True, True, False]


@pytest.mark.parametrize("last", [1, 2], ids=["cut-in-the-first-half", "cut-in-the-middle"])
def test_only_iterations_that_every_rank_ended_are_steady(last: int):
    kept = [event for event in whole_run() if event[0] == 0 or event[2] <= last]
    figures = statistics(timeline(*kept), 2)
    assert figures.steady.tolist() == [False, last >= 2, False, False]
    assert all(np.isfinite(row.bubble) for row in stage_times(figures, [0, 1]))


def test_without_events_nothing_is_known():
    figures = statistics(timeline(), 2)
    assert figures.middle is None
    assert figures.bubble is None
    assert stage_times(figures, [0, 1]) == []


def test_the_middle_iteration_is_the_steady_one_of_median_length():
    slower = [(0, "batch-generator", number, start, start + 1) for number, start in ((3, 290), (4, 380), (2, 195))]
    figures = statistics(timeline(*whole_run(), *slower), 2)
    assert figures.length_ns.tolist() == [100 * MS, 105 * MS, 110 * MS, 120 * MS]
    assert figures.iterations[figures.middle] == 3


def test_without_a_steady_iteration_the_page_opens_at_the_last():
    figures = statistics(timeline(*one_iteration(1, 0)), 2)
    assert not figures.steady.any()
    assert figures.middle == 0


def test_a_stage_has_medians_of_each_kind_of_time():
    first, second = stage_times(statistics(RUN, 2), [0, 1])
    assert (first.forward_ms, first.backward_ms, first.wait_ms, first.optimizer_ms) == (20, 40, 30, 8)
    assert first.bubble == pytest.approx(0.4)
    assert (second.wait_ms, second.all_reduce_ms, second.send_ms) == (19, 50, 0)
    assert second.bubble == pytest.approx(0.7)


def replayed_bubble(name: str, stages: int, chunks: int, micro_batches: int) -> Fraction:
    """Bubble of the engine's schedule when each forward pass and each part of a backward pass takes one slot."""
    todo = schedule(name, stages, chunks, micro_batches)
    free = [0] * stages
    done: dict[tuple[str, int, int], int] = {}
    while any(todo):
        for stage in range(stages):
            while todo[stage]:
                kind, m, chunk = todo[stage][0]
                here, way = chunk * stages + stage, kind.value.split("-")[0]
                if kind.value.endswith("-recv"):
                    sent = done.get((way, here + (-1 if way == "forward" else 1), m))
                    if sent is None:
                        break
                    free[stage] = max(free[stage], sent)
                elif kind.value.endswith("-compute"):
                    free[stage] += 2 if kind is Kind.BACKWARD else 1
                    if kind is not Kind.BACKWARD_WEIGHT:
                        done[way, here, m] = free[stage]
                todo[stage].pop(0)
    return 1 - Fraction(3 * micro_batches * chunks, max(free))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1)],
    ids=lambda value: str(value),
)
@given(stages=st.integers(2, 9), micro_batches=st.integers(1, 24))
def test_the_ideal_bubble_is_that_of_the_engines_schedule_in_unit_slots(
    name: str, chunks: int, stages: int, micro_batches: int
):
    found = ideal_bubble(name, stages, chunks, micro_batches)
    if found is not None:
        assert Fraction(found.idle, found.length) == replayed_bubble(name, stages, chunks, micro_batches)


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "micro_batches", "value"),
    [
        pytest.param("gpipe", 4, 1, 2, 3 / 5, id="gpipe"),
        pytest.param("one_f_one_b", 8, 1, 16, 7 / 23, id="1f1b"),
        pytest.param("one_f_one_b", 1, 1, 1, 0, id="one-stage"),
        pytest.param("interleaved", 4, 2, 8, 3 / 19, id="interleaved"),
        pytest.param("interleaved", 4, 2, 6, None, id="interleaved-of-no-whole-groups"),
        pytest.param("zb_h1", 8, 1, 16, 7 / 55, id="zb-h1"),
        pytest.param("zb_h1", 8, 1, 7, None, id="zb-h1-of-few-micro-batches"),
        pytest.param("own", 8, 1, 16, None, id="unknown"),
    ],
)
def test_the_ideal_bubble_is_shown_where_a_formula_holds(
    name: str, stages: int, chunks: int, micro_batches: int, value: float | None
):
    found = ideal_bubble(name, stages, chunks, micro_batches)
    assert (found and found.fraction) == (None if value is None else pytest.approx(value))


def test_both_parts_of_a_backward_pass_are_computation():
    split = [
        (0, "forward-compute", 2, 0, 10),
        (0, "backward-input-compute", 2, 10, 22),
        (0, "backward-weight-compute", 2, 30, 38),
        (0, "layernorm-grads-all-reduce", 2, 38, 50),
    ]
    figures = statistics(timeline((0, "optimizer", 1, -100, -90), *split), 1)
    assert figures.compute_share[0, 1] == pytest.approx(0.6)
    (row,) = stage_times(figures, [0])
    assert (row.forward_ms, row.backward_ms, row.all_reduce_ms) == (10, 20, 12)
