"""The critical path, a replay and idle times of iterations that are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.contract.plan_parts import Place
from reports.errors import ReportError
from reports.facts.breakdown import message_pairs
from reports.path.critical import critical_path
from reports.path.graph import EdgeKind, Graph
from reports.path.graph_of_events import GAP, Piece, Span, make_graphs, pieces
from reports.readers.events import EVENT, Timeline, frame

Row = tuple[int, str, int, int, int]
"""Rank, name, start, end, peer."""
TWO_STAGES: list[Row] = [
    (0, "forward-compute", 0, 10, -1),
    (0, "forward-send", 10, 10, 1),
    (0, "backward-recv", 10, 42, 1),
    (0, "backward-compute", 42, 60, -1),
    (0, "embedding-grads-all-reduce", 60, 75, -1),
    (0, "optimizer", 75, 80, -1),
    (1, "batch-generator", 0, 3, -1),
    (1, "forward-recv", 3, 14, 0),
    (1, "forward-compute", 14, 24, -1),
    (1, "backward-compute", 24, 40, -1),
    (1, "backward-send", 40, 40, 0),
    (1, "embedding-grads-all-reduce", 40, 75, -1),
    (1, "optimizer", 75, 90, -1),
]
RANKS = [Place(rank, 0, rank, rank, 0, 0) for rank in range(2)]


def made(rows: list[Row], ranks: list[Place] = RANKS) -> Graph:
    names = tuple(dict.fromkeys(row[1] for row in rows))
    records = np.zeros(len(rows), EVENT)
    for record, (rank, name, start, end, peer) in zip(records, sorted(rows, key=lambda row: row[0]), strict=True):
        record["rank"], record["name"], record["peer"] = rank, names.index(name), peer
        record["start_ns"], record["end_ns"], record["iteration"], record["micro_batch"] = start, end, 2, -1
    return make_graphs(Timeline(frame(records, names), {}, 0, ()), ranks, [2])[0]


def test_the_path_goes_over_messages_and_collectives_and_ends_where_it_begins():
    path = [(one.kind, one.rank, one.sender, one.start_ns, one.end_ns) for one in critical_path(made(TWO_STAGES))]
    assert path == [
        (EdgeKind.COMPUTE, 0, -1, 0, 10),
        (EdgeKind.MESSAGE, 1, 0, 10, 14),
        (EdgeKind.COMPUTE, 1, -1, 14, 24),
        (EdgeKind.COMPUTE, 1, -1, 24, 40),
        (EdgeKind.MESSAGE, 0, 1, 40, 42),
        (EdgeKind.COMPUTE, 0, -1, 42, 60),
        (EdgeKind.EMBEDDING, 0, -1, 60, 75),
        (EdgeKind.OPTIMIZER, 0, -1, 75, 80),
    ]


def test_an_iteration_has_the_same_graph_beside_others_whose_messages_were_lost_or_overtaken():
    """Rank 1 takes the second micro-batch first; of iteration 1 the first message alone was recorded by rank 0."""
    names = ("forward-send", "forward-recv")
    rows = [
        (iteration, rank, rank, micro_batch, 100 * iteration + 10 * turn, 100 * iteration + 10 * turn + rank * 5)
        for rank in (0, 1)
        for iteration in (1, 2, 3)
        for turn, micro_batch in enumerate((0, 1) if rank == 0 else (1, 0))
        if (iteration, rank, micro_batch) != (1, 0, 1)
    ]
    records = np.zeros(len(rows), EVENT)
    for record, row in zip(records, rows, strict=True):
        for key, value in zip(("iteration", "rank", "name", "micro_batch", "start_ns", "end_ns"), row, strict=True):
            record[key] = value
    records["peer"] = 1 - records["rank"]
    timeline = Timeline(frame(records, names), {}, 0, ())
    forward, _ = message_pairs(timeline, RANKS)
    iteration, micro_batch = (timeline.events[key].to_numpy() for key in ("iteration", "micro_batch"))
    taken = [
        (iteration[receive], micro_batch[receive], iteration[send]) for receive, send in zip(*forward, strict=True)
    ]
    assert sorted(taken) == [(1, 0, 1), (2, 0, 2), (2, 1, 2), (3, 0, 3), (3, 1, 3)]
    for graph, number in zip(make_graphs(timeline, RANKS, [1, 2, 3]), (1, 2, 3), strict=True):
        (alone,) = make_graphs(timeline, RANKS, [number])
        assert [*critical_path(graph)] == [*critical_path(alone)]


def test_a_replay_gives_the_recorded_times_and_others_for_other_lengths():
    graph = made(TWO_STAGES)
    assert graph.ends(graph.ready_ns) == graph.ended_ns == {0: 80, 1: 90}
    assert graph.period_ns() == 80, "rank 0 goes on at 80 while rank 1 is still at its optimizer"
    free = np.where(graph.kind == EdgeKind.EMBEDDING, 0, graph.lasts_ns)
    assert graph.ends(graph.ready_ns, free) == {0: 65, 1: 75}
    slower = np.where((graph.kind == EdgeKind.OPTIMIZER) & (graph.on == 1), 40, graph.lasts_ns)
    assert graph.period_ns(slower) == 104, "then rank 0 waits for rank 1 in every iteration"


def test_a_receive_that_its_message_did_not_keep_waiting_stays_on_its_rank():
    rows = [
        (0, "forward-compute", 0, 10, -1),
        (0, "forward-send", 10, 10, 1),
        (0, "forward-compute", 10, 20, -1),
        (0, "forward-send", 20, 20, 1),
        (1, "forward-recv", 0, 12, 0),
        (1, "forward-compute", 12, 50, -1),
        (1, "forward-recv", 50, 51, 0),
        (1, "forward-compute", 51, 90, -1),
    ]
    path = [(one.kind, one.rank, one.lasts_ns) for one in critical_path(made(rows))]
    assert path == [
        *((EdgeKind.COMPUTE, 0, 10), (EdgeKind.MESSAGE, 1, 2), (EdgeKind.COMPUTE, 1, 38)),
        *((EdgeKind.MESSAGE, 1, 1), (EdgeKind.COMPUTE, 1, 39)),
    ]


def test_sums_beside_the_backward_pass_end_before_the_rank_has_taken_them():
    ranks = [Place(rank, 0, rank, 0, rank, 0) for rank in range(2)]
    rows = [
        (0, "backward-compute", 0, 20, -1),
        (0, "overlapped-grads-all-reduce", 5, 16, -1),
        (0, "overlapped-grads-all-reduce", 18, 34, -1),
        (0, "grads-all-reduce", 20, 34, -1),
        (1, "backward-compute", 0, 28, -1),
        (1, "overlapped-grads-all-reduce", 10, 16, -1),
        (1, "overlapped-grads-all-reduce", 26, 34, -1),
        (1, "grads-all-reduce", 28, 34, -1),
    ]
    graph = made(rows, ranks)
    assert graph.ends(graph.ready_ns) == graph.ended_ns
    path = [(one.kind, one.rank, one.lasts_ns) for one in critical_path(graph)]
    assert [one for one in path if one[0] is EdgeKind.GRADIENTS][-1][2] == 8
    assert sum(lasts for kind, _, lasts in path if kind is EdgeKind.COMPUTE) == 26
    assert {rank for kind, rank, _ in path if kind is EdgeKind.COMPUTE} == {1}


def test_updates_of_buckets_between_the_sums_wait_for_those_alone_that_they_take():
    ranks = [Place(rank, 0, rank, 0, rank, 0) for rank in range(2)]
    rows = [
        (rank, *event, -1)
        for rank in range(2)
        for event in (
            ("backward-compute", 0, 20),
            ("overlapped-grads-all-reduce", 5, 16),
            ("overlapped-grads-all-reduce", 18, 40),
            ("optimizer", 20, 50),
            ("grads-all-reduce", 20, 21),
            ("grads-all-reduce", 30, 40),
        )
    ]
    graph = made(rows, ranks)
    assert graph.ends(graph.ready_ns) == graph.ended_ns == {0: 50, 1: 50}
    slower = np.where((graph.kind == EdgeKind.OPTIMIZER), 2 * graph.lasts_ns, graph.lasts_ns)
    assert graph.ends(graph.ready_ns, slower) == {0: 60, 1: 60}, "the update of the first bucket hides behind the sum"


def test_messages_that_were_taken_before_they_were_sent_are_an_error():
    rows = [
        (0, "forward-recv", 0, 5, 1),
        (0, "forward-send", 5, 6, 1),
        (1, "forward-recv", 0, 5, 0),
        (1, "forward-send", 5, 6, 0),
    ]
    with pytest.raises(ReportError, match="iteration 2 contradict each other"):
        made(rows)


def test_pieces_follow_each_other_and_the_inner_event_has_its_time():
    spans = [Span(2, 20, 0), Span(5, 9, 1), Span(9, 9, 2), Span(15, 18, 3), Span(25, 30, 4), Span(28, 40, 5)]
    assert pieces(0, spans) == [
        Piece(0, 2, GAP),
        Piece(2, 5, 0),
        Piece(5, 9, 1),
        Piece(9, 9, 2),
        Piece(9, 15, 0),
        Piece(15, 18, 3),
        Piece(18, 20, 0),
        Piece(20, 25, GAP),
        Piece(25, 28, 4),
        Piece(28, 40, 5),
    ]
