"""Where a stage's time goes adds up to its iteration, and waiting is told from transfer, message by message."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from conf.run_folder.rundir import RunDir
from reports.facts.breakdown import NORM, UNKNOWN, waiting_ns
from reports.facts.frames import Terms, measured
from reports.facts.statistics import statistics
from reports.readers import record
from reports.readers.events import Timeline, read_run
from reports.readers.record import Record
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run

SHAPES = {
    "one-stage": Shape(pipeline=1, data=3),
    "1f1b": Shape(pipeline=3, data=2, ranks_per_node=2),
    "interleaved": Shape(pipeline=2, data=2, chunks=2, schedule="interleaved"),
    "zb-h1": Shape(pipeline=4, schedule="zb_h1"),
}
SENDS = {"forward-recv": ("forward-send", -1), "backward-recv": ("backward-send", 1)}


def read(folder: Path, shape: Shape) -> tuple[Record, Timeline]:
    run = RunDir(folder / "runs/tiny/20260101-000000-aaaa")
    make_run(run.path, shape)
    return record.read(run), read_run({rank: run.rank_events(rank) for rank in range(shape.ranks)})


def waited(timeline: Timeline, shape: Shape) -> list[int]:
    """The same as waiting_ns, event by event."""
    rows = [{key: int(row[key]) for key in row.dtype.names} for row in records(timeline)]
    for row in rows:
        row["stage"], row["dp"] = divmod(row["rank"], shape.data)
    name = timeline.names
    found = []
    for row in rows:
        until = [row["start_ns"]]
        kind = name[row["name"]]
        same = [other for other in rows if other["iteration"] == row["iteration"]]
        if kind in SENDS:
            send, step = SENDS[kind]
            sender = row["chunk"] * shape.pipeline + row["stage"] + step  # virtual stage
            until = [
                other["start_ns"]
                for other in same
                if (name[other["name"]], other["rank"], other["micro_batch"], other["peer"])
                == (send, row["peer"], row["micro_batch"], row["rank"])
                and other["chunk"] == sender // shape.pipeline
            ]
            assert len(until) == 1
        elif kind in ("grads-all-reduce", "embedding-grads-all-reduce", NORM):
            key = "stage" if kind == "grads-all-reduce" else "dp"
            until = [o["start_ns"] for o in same if o["name"] == row["name"] and o[key] == row[key]]
        found.append(min(max(max(until) - row["start_ns"], 0), row["end_ns"] - row["start_ns"]))
    return found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_waiting_lasts_until_the_other_rank_sends_or_the_last_of_the_group_begins(tmp_path: Path, shape: Shape):
    known, timeline = read(tmp_path, shape)
    found = waiting_ns(timeline, known.plan.ranks)
    assert np.maximum(found, 0).tolist() == waited(timeline, shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_terms_of_a_stage_are_its_iteration_and_none_is_negative(tmp_path: Path, shape: Shape):
    known, timeline = read(tmp_path, shape)
    figures = statistics(timeline, known.plan.ranks)
    length_ms = float(np.median(figures.length_ns[figures.steady])) / 1e6
    found = measured(figures, known.plan, length_ms)
    assert list(found) == list(range(shape.pipeline))
    for terms in found.values():
        assert terms.total == pytest.approx(length_ms)
        assert min(getattr(terms, field.name) for field in fields(Terms)) >= 0
        assert terms.other < 0.1 * length_ms


def test_a_message_whose_send_was_not_recorded_counts_as_transfer(tmp_path: Path):
    shape = SHAPES["1f1b"]
    known, timeline = read(tmp_path, shape)
    kept = ~np.isin(records(timeline)["rank"], [0, 1])
    part = Timeline(timeline.events[kept].reset_index(drop=True), timeline.hosts, 0, ())
    receives = records(part)["name"] == part.names.index("forward-recv")
    from_first = receives & (records(part)["peer"] < 2)
    waits = waiting_ns(part, known.plan.ranks)
    assert from_first.any()
    assert (waits[from_first] == UNKNOWN).all()
    assert (waits[receives & ~from_first] > 0).any()
