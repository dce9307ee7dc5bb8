"""Runs whose cause is known, read from their files: what gains most is that cause, and ranks are idle for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from reports.facts.statistics import statistics
from reports.path.change import Cause
from reports.path.critical import IDLE, critical_path, idle_frame
from reports.path.graph_of_events import make_graphs
from reports.path.what_if import gains
from reports.readers import record
from reports.readers.events import read_run
from tests.support.reports.synthetic import Shape, make_run

LAYOUTS = {
    "1f1b": Shape(pipeline=4, micro_batches=8),
    "1f1b-data-parallel": Shape(pipeline=4, data=2, micro_batches=8),
    "interleaved": Shape(pipeline=4, chunks=2, schedule="interleaved", micro_batches=8, layers=16),
    "zb-h1-data-parallel": Shape(pipeline=4, data=2, schedule="zb_h1", micro_batches=8),
}
IDLE_FOR = {
    Cause.RANK: "slow neighbour",
    Cause.LINK: "message",
    Cause.PARTITION: "slow neighbour",
    Cause.DATA: "data",
    Cause.EMBEDDING: "collective",
}
"""Beside what the order of the pipeline costs, the most."""
UNEVEN = {4: (1, 4, 2, 1), 8: (2, 4, 2, 1, 1, 3, 2, 1)}
"""By the number of virtual stages."""


def caused(shape: Shape, cause: Cause) -> Shape:
    """The same with one thing that is wrong."""
    match cause:
        case Cause.RANK:
            return replace(shape, slow={shape.data: 2.0})
        case Cause.LINK:
            return replace(shape, link_ns={1: 20_000_000})
        case Cause.PARTITION:
            return replace(shape, parts=UNEVEN[shape.pipeline * shape.chunks])
        case Cause.DATA:
            return replace(shape, data_ns=25e6)
        case _:
            return replace(shape, embedding_ns=120e6)


CASES = (
    (Cause.RANK, "1f1b"),
    (Cause.LINK, "1f1b-data-parallel"),
    (Cause.PARTITION, "zb-h1-data-parallel"),
    (Cause.DATA, "1f1b"),
    (Cause.EMBEDDING, "interleaved"),
)


@pytest.mark.parametrize(("cause", "layout"), CASES)
def test_what_gains_most_is_what_is_wrong(tmp_path: Path, cause: Cause, layout: str):
    shape = caused(LAYOUTS[layout], cause)
    run = RunDir(tmp_path / "runs/tiny/20260101-000000-aaaa")
    make_run(run.path, shape)
    known, timeline = record.read(run), read_run({rank: run.rank_events(rank) for rank in range(shape.ranks)})
    figures = statistics(timeline, known.plan.ranks)
    graph = make_graphs(timeline, known.plan.ranks, [int(figures.iterations[figures.middle])])[0]
    found = gains([graph], known.plan)
    assert found[0].cause == cause, found
    assert found[0].share > 0.05
    idle = idle_frame(graph, known.plan)
    assert idle[["compute", "optimizer", *IDLE]].sum(axis=1).tolist() == pytest.approx(
        [graph.period_ns() / 1e6] * shape.ranks, rel=1e-5
    )
    assert idle[list(IDLE[1:])].mean().idxmax() == IDLE_FOR[cause]
    path = critical_path(graph)
    assert all(after.start_ns == before.end_ns for before, after in pairwise(path))
