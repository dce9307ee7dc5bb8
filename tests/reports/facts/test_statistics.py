"""Lengths, shares and bubbles are what their definitions say."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasop.simulation.ranks.replay import StageTimes, simulate
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.iteration import as_json, schedule
from megatron_ext.contract.schedule.schedules import Kind
from reports.facts.breakdown import PARTS, UNKNOWN, waiting_ns
from reports.facts.statistics import Statistics, ideal_bubble
from reports.facts.statistics import statistics as statistics_of
from reports.readers.events import EVENT, Timeline, frame, legend_order
from tests.support.fasop.replays import pipeline_time

MS = 1_000_000
SENDS_TO = {"forward-send": 1, "backward-send": -1, "forward-recv": -1, "backward-recv": 1}
"""The other rank of a message: how many stages further."""


Row = tuple[int, str, int, int, int] | tuple[int, str, int, int, int, int]
"""Rank, name, iteration, start ms, end ms and, of a message, the other rank."""


def timeline(*events: Row) -> Timeline:
    names = legend_order({name for _, name, *_ in events})
    rows = [
        (rank, names.index(name), 0, n, -1, peer[0] if peer else -1, start * MS, end * MS)
        for rank, name, n, start, end, *peer in events
    ]
    return Timeline(frame(np.sort(np.array(rows, EVENT), order=["rank", "start_ns"]), names), {}, 0, ())


def statistics(timeline: Timeline, ranks: int) -> Statistics:
    """Of ranks of which each is a stage."""
    return statistics_of(timeline, [Place(rank, 0, 0, rank, 0, 0) for rank in range(ranks)])


def one_iteration(number: int, start: int) -> list[Row]:
    """100 ms: rank 0 computes 60 ms of them and waits 29 ms for rank 1, which computes 28 ms and waits 61 ms."""
    events: list[Row] = [
        (0, "forward-compute", number, 0, 20),
        (0, "forward-send", number, 20, 21, 1),
        (0, "backward-recv", number, 21, 52, 1),
        (0, "backward-compute", number, 52, 92),
        (0, "embedding-grads-all-reduce", number, 92, 94),
        (0, "optimizer", number, 94, 100),
        (0, "optimizer-clip-main-grad", number, 94, 96),
        (0, "grad-norm-all-reduce", number, 94, 95),
        (1, "forward-recv", number, 0, 22, 0),
        (1, "forward-compute", number, 22, 30),
        (1, "loss-compute", number, 30, 32),
        (1, "backward-compute", number, 32, 50),
        (1, "backward-send", number, 50, 51, 0),
        (1, "embedding-grads-all-reduce", number, 51, 94),
        (1, "optimizer", number, 94, 98),
        (1, "grad-norm-all-reduce", number, 94, 95),
    ]
    return [(rank, name, n, start + a, start + b, *peer) for rank, name, n, a, b, *peer in events]


BUBBLES = (29 / 89, 61 / 89)
"""Of the ranks in it."""


def whole_run() -> list[Row]:
    """Four iterations."""
    return [event for number, start in ((1, 0), (2, 200), (3, 300), (4, 400)) for event in one_iteration(number, start)]


RUN = timeline(*whole_run())


def test_length_is_from_the_first_start_to_the_last_end_over_all_ranks():
    figures = statistics(RUN, 2)
    assert figures.iterations.tolist() == [1, 2, 3, 4]
    assert figures.length_ns.tolist() == [100 * MS] * 4


def test_an_iteration_of_a_rank_is_made_of_its_parts():
    figures = statistics(RUN, 2)
    expected = {
        "forward": (20, 10),
        "backward": (40, 18),
        "bubble": (29, 61),
        "tensor": (0, 0),
        "messages": (3, 3),
        "all_reduce": (3, 3),
        "imbalance": (0, 0),
        "optimizer": (5, 3),
    }
    assert {part: tuple(getattr(figures.spent, part)[:, 1]) for part in PARTS} == expected
    for values in vars(figures.spent).values():
        assert (values == values[:, :1]).all()
    assert figures.compute_share == pytest.approx(np.array([[0.6] * 4, [0.28] * 4]))
    assert figures.communication_share == pytest.approx(np.array([[0.06] * 4, [0.06] * 4]))
    assert figures.communication == pytest.approx(0.06)


def test_the_bubble_is_a_fraction_of_passes_and_bubble_however_long_the_rest_takes():
    longer = [
        (rank, "optimizer", number, a, b + 500, *peer) if name == "optimizer" else (rank, name, number, a, b, *peer)
        for number in (1, 2)
        for rank, name, number, a, b, *peer in one_iteration(number, 1000 * number)
    ]
    for figures in (statistics(RUN, 2), statistics(timeline(*longer), 2)):
        assert figures.bubble_share[:, 1] == pytest.approx(np.array(BUBBLES))
        assert figures.bubble == pytest.approx(sum(BUBBLES) / 2)


def overlapping() -> Timeline:
    """One iteration begins every 80 ms, while rank 1 is still at the one before."""
    return timeline(*(event for number in (1, 2, 3) for event in one_iteration(number, 80 * number)))


def test_time_that_two_iterations_share_counts_once():
    figures = statistics(overlapping(), 2)
    assert figures.length_ns.tolist() == [100 * MS] * 3
    assert figures.period_ns.tolist() == [100 * MS, 80 * MS, 80 * MS]
    assert figures.usual_period_ms == 80
    assert figures.bubble == pytest.approx(sum(BUBBLES) / 2)
    assert figures.compute_share[:, 1:] == pytest.approx(np.array([[60 / 80] * 2, [28 / 80] * 2]))


def test_what_passes_between_two_iterations_is_in_no_period():
    assert statistics(RUN, 2).period_ns.tolist() == [100 * MS] * 4


def test_no_rank_computes_longer_than_the_period_of_an_iteration_that_cannot_end_before_another():
    figures = statistics(timeline(*one_iteration(1, 500), *one_iteration(2, 0)), 2)
    assert figures.compute_share[:, 1] == pytest.approx([1, 28 / 60])


def test_a_rank_without_events_has_no_share_and_does_not_count_in_the_bubble():
    figures = statistics(RUN, 3)
    assert np.isnan(figures.compute_share[2]).all()
    assert figures.bubble == pytest.approx(sum(BUBBLES) / 2)


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
    assert figures.bubble is None or np.isfinite(figures.bubble)


def test_without_events_nothing_is_known():
    figures = statistics(timeline(), 2)
    assert figures.middle is None
    assert figures.bubble is None
    assert figures.communication is None


def test_the_middle_iteration_is_the_steady_one_of_median_length():
    slower = [(0, "batch-generator", number, start, start + 1) for number, start in ((3, 290), (4, 380), (2, 195))]
    figures = statistics(timeline(*whole_run(), *slower), 2)
    assert figures.length_ns.tolist() == [100 * MS, 105 * MS, 110 * MS, 120 * MS]
    assert figures.iterations[figures.middle] == 3


def test_without_a_steady_iteration_the_page_opens_at_the_last():
    figures = statistics(timeline(*one_iteration(1, 0)), 2)
    assert not figures.steady.any()
    assert figures.middle == 0


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
    [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("model_parallel", 1)],
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
        pytest.param("model_parallel", 4, 1, 16, 3 / 4, id="model-parallel"),
        pytest.param("own", 8, 1, 16, None, id="unknown"),
    ],
)
def test_the_ideal_bubble_is_shown_where_a_formula_holds(
    name: str, stages: int, chunks: int, micro_batches: int, value: float | None
):
    found = ideal_bubble(name, stages, chunks, micro_batches)
    assert (found and found.fraction) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "micro_batches"),
    [("gpipe", 3, 1, 4), ("one_f_one_b", 4, 1, 6), ("interleaved", 3, 2, 6), ("zb_h1", 4, 1, 8), ("gpipe", 1, 1, 3)],
    ids=lambda value: str(value),
)
def test_equal_stages_and_free_messages_have_the_ideal_bubble_whatever_follows_the_passes(
    name: str, stages: int, chunks: int, micro_batches: int
):
    todo = as_json(schedule(name, stages, chunks, micro_batches), chunks, micro_batches)
    times = StageTimes(forward=[10] * chunks, backward=[20] * chunks, send_forward=0, send_backward=0)
    events, places = simulate(todo, [times] * stages), range(stages)
    end = int(pipeline_time(events)) + 1
    rows: list[Row] = []
    for number in (1, 2):
        start = 5000 * number
        for one in events:
            away = (one.stage + SENDS_TO[one.kind]) % stages if one.kind in SENDS_TO else -1
            rows.append((one.stage, one.kind, number, start + int(one.start), start + int(one.end), away))
        for stage in places:
            done = max(int(one.end) for one in events if one.stage == stage)
            rows += [
                (stage, "grads-all-reduce", number, start + done, start + done + 40),
                (stage, "grad-norm-all-reduce", number, start + done + 40, start + end + 50),
                (stage, "optimizer", number, start + done + 40, start + end + 150),
            ]
    assert statistics(timeline(*rows), stages).bubble == pytest.approx(
        ideal_bubble(name, stages, chunks, micro_batches).fraction
    )


def test_both_parts_of_a_backward_pass_are_computation():
    split = [
        (0, "forward-compute", 2, 0, 10),
        (0, "backward-input-compute", 2, 10, 22),
        (0, "backward-weight-compute", 2, 30, 38),
        (0, "layernorm-grads-all-reduce", 2, 38, 50),
    ]
    figures = statistics(timeline((0, "optimizer", 1, -100, -90), *split), 1)
    assert figures.compute_share[0, 1] == pytest.approx(0.6)
    parts = figures.spent
    assert (parts.forward[0, 1], parts.backward[0, 1], parts.all_reduce[0, 1]) == (10, 20, 12)


def tensor_group(delay: int) -> tuple[Timeline, list[Place]]:
    """Two ranks of a tensor group, of which rank 1 computes `delay` ms longer in the forward pass."""
    events: list[Row] = []
    for number in (1, 2):
        start = 1000 * number
        for rank, own in ((0, 0), (1, delay)):
            begins = [start + 10 + own, start + 40 + delay, start + 70 + delay]
            ends = [start + 12 + delay, start + 43 + delay, start + 71 + delay]
            events += [
                (rank, "forward-compute", number, start, start + 30 + delay),
                (rank, "loss-compute", number, start + 30 + delay, start + 60 + delay),
                (rank, "backward-compute", number, start + 60 + delay, start + 100 + delay),
                *((rank, "tensor-all-reduce", number, a, b) for a, b in zip(begins, ends, strict=True)),
                (rank, "overlapped-grads-all-reduce", number, start + 90 + delay, start + 300),
                (rank, "optimizer", number, start + 300, start + 320),
                (rank, "grad-norm-all-reduce", number, start + 300 + own, start + 302 + delay),
                (rank, "params-all-gather", number, start + 315, start + 320),
            ]
    return timeline(*events), [Place(rank, 0, 0, 0, 0, rank) for rank in range(2)]


@pytest.mark.parametrize("delay", [0, 8])
def test_communication_inside_a_pass_is_no_computing_and_a_slower_rank_of_the_group_is_waited_for(delay: int):
    found = statistics_of(*tensor_group(delay)).spent
    assert found.passes[:, 1].tolist() == [100 + delay] * 2
    for rank, own in ((0, 0), (1, delay)):
        parts = {part: getattr(found, part)[rank, 1] for part in PARTS}
        assert parts == {
            "forward": 60 + own - 5,
            "backward": 39,
            "bubble": 0,
            "tensor": 6,
            "messages": 0,
            "all_reduce": 2 + 5,
            "imbalance": 2 * (delay - own),
            "optimizer": 20 - 2 - delay + own - 5,
        }, rank


def test_in_files_without_the_norms_all_reduce_clipping_waits_for_the_other_stages():
    old = [row for row in whole_run() if row[1] not in ("grad-norm-all-reduce", "optimizer-clip-main-grad")]
    clips = [(rank, "optimizer-clip-main-grad", 2, 294 + rank, 297) for rank in (0, 1)]
    found = statistics(timeline(*old, *clips), 2).spent
    assert found.bubble[:, 1].tolist() == [30, 61]
    assert found.optimizer[:, 1].tolist() == [5, 4]
    assert found.all_reduce[:, 1].tolist() == [2, 2]


def test_megatron_lm_computes_the_loss_inside_the_forward_pass():
    inside = [(0, "forward-compute", 2, 0, 10), (0, "loss-compute", 2, 8, 10), (0, "backward-compute", 2, 10, 30)]
    figures = statistics(timeline((0, "optimizer", 1, -100, -90), *inside), 1)
    assert figures.spent.forward[0, 1] == 10


def test_of_a_send_that_also_receives_the_wait_lasts_until_the_other_rank_sends():
    """As Megatron-LM does in one call; which of the calls of a rank is which message follows from their order."""
    run = timeline(
        (0, "forward-send-backward-recv", 1, 0, 40, 1),
        (0, "forward-send-backward-recv", 1, 50, 90, 1),
        (1, "backward-send-forward-recv", 1, 30, 55, 0),
        (1, "backward-send", 1, 70, 72, 0),
    )
    waits = waiting_ns(run, [Place(rank, 0, 0, rank, 0, 0) for rank in range(2)])
    assert waits.tolist() == [30 * MS, 20 * MS, 0, UNKNOWN]
