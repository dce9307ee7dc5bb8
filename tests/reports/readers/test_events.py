"""Event files become one table on one clock, and what is wrong with them is said."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import TdppError
from reports.readers.events import EVENT, RECORD, Timeline, aligned, read_rank, read_run
from tests.support.reports.records import records
from tests.support.reports.synthetic import NAMES, Shape, make_run

SHAPE = Shape(pipeline=2, data=2, micro_batches=3, iterations=2, ranks_per_node=2)


@pytest.fixture
def run(tmp_path: Path) -> tuple[dict[int, Path], list[list[tuple[int, ...]]]]:
    """Paths of the event files, and what happened by rank 0's clock."""
    records = make_run(tmp_path / "runs/tiny/1", SHAPE)
    return {rank: tmp_path / f"runs/tiny/1/events/rank-{rank:05d}.bin" for rank in range(SHAPE.ranks)}, records


def rows(timeline: Timeline, rank: int) -> list[tuple]:
    events = records(timeline)[records(timeline)["rank"] == rank]
    return [(timeline.names[event["name"]], *event.tolist()[2:]) for event in events]


def test_every_event_is_read_and_sits_on_rank_0s_clock(run):
    paths, records = run
    timeline = read_run(paths)
    assert timeline.notes == ()
    assert timeline.ranks == [0, 1, 2, 3]
    for rank, known in enumerate(records):
        expected = sorted((NAMES[name], *rest) for name, *rest in known)
        found = sorted(rows(timeline, rank))
        assert [row[:5] for row in found] == [row[:5] for row in expected]
        # Rounding to whole nanoseconds on the rank's own clock, and back.
        assert np.abs(np.array([row[5:] for row in found]) - [row[5:] for row in expected]).max() <= 2


def test_ranks_on_rank_0s_host_keep_their_times_exactly(run):
    paths, records = run
    timeline = read_run(paths)
    assert sorted(rows(timeline, 1)) == sorted((NAMES[name], *rest) for name, *rest in records[1])


def test_the_largest_clock_uncertainty_is_known(run):
    assert read_run(run[0]).uncertainty_ns == 31_000


def test_events_of_a_rank_are_sorted_by_start(run):
    events = read_run(run[0]).events
    assert (np.diff(events["rank"]) >= 0).all()
    assert (np.diff(events["start_ns"])[np.diff(events["rank"]) == 0] >= 0).all()


def test_a_record_cut_short_is_left_out_and_said(run):
    paths, _ = run
    whole = len(read_run(paths).events)
    content = paths[2].read_bytes()
    paths[2].write_bytes(content[: -RECORD.itemsize - 5])  # the last record is a clock record
    timeline = read_run(paths)
    assert len(timeline.events) == whole - 1
    assert timeline.notes == ("rank 2: the last record is cut short (27 of 32 bytes); ignored",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "not an event file: expected it to start with b'TDPPEVT1', found b'' (an empty", id="empty"),
        pytest.param(b"PK\x03\x04zipfile", r"expected it to start with b'TDPPEVT1', found b'PK\x03\x04zipf'", id="zip"),
        pytest.param(b"TDPPEVT1\x01", "expected a JSON header after the first 12 bytes, found none", id="no-length"),
        pytest.param(b"TDPPEVT1\x09\0\0\0{", "expected a JSON header after the first 12 bytes", id="cut-header"),
        pytest.param(
            b'TDPPEVT1\x0d\0\0\0{"version":7}', "expected an event file of version 1, found version 7", id="v7"
        ),
        pytest.param(
            b'TDPPEVT1\x0d\0\0\0{"version":1}',
            "its header is damaged, or of another version of tdpp: it lacks rank, host",
            id="lacks",
        ),
    ],
)
def test_a_file_that_is_no_event_file_says_what_was_expected_and_found(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "rank-00003.bin"
    path.write_bytes(content)
    with pytest.raises(TdppError) as error:
        read_rank(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    timeline = read_run({3: path})
    assert timeline.notes == (f"rank 3: {error.value}",)
    assert len(timeline.events) == 0


def test_absent_files_are_said_in_one_note(run):
    paths, _ = run
    for rank in (1, 2, 3):
        paths[rank].unlink()
    assert read_run(paths).notes == ("no event file for ranks 1-3",)


def test_a_file_under_the_name_of_another_rank_is_left_out_and_said(run):
    paths, _ = run
    paths[1].write_bytes(paths[0].read_bytes())
    timeline = read_run(paths)
    assert timeline.ranks == [0, 2, 3]
    assert timeline.notes == (f"rank 1: {paths[1]} belongs to rank 0; ignored",)


def test_records_that_cannot_be_are_left_out_and_said(run):
    paths, records = run
    zeros = np.zeros(2, RECORD)
    zeros["name"] = [99, 1]
    zeros["start_ns"] = 5
    with paths[0].open("ab") as file:
        file.write(zeros.tobytes())
    timeline = read_run(paths)
    assert timeline.notes == (
        f"rank 0: 2 of {len(records[0]) + 4} records have an unknown name or end before they start; ignored",
    )
    assert len(rows(timeline, 0)) == len(records[0])


def without_clock(path: Path) -> None:
    content = path.read_bytes()
    start = 12 + struct.unpack_from("<I", content, 8)[0]
    records = np.frombuffer(content, RECORD, offset=start)
    path.write_bytes(content[:start] + records[records["name"] != NAMES.index("clock")].tobytes())


def test_a_rank_on_another_host_without_clock_records_is_placed_by_the_system_clocks_and_said(run):
    paths, records = run
    without_clock(paths[3])
    timeline = read_run(paths)
    assert timeline.notes == ("rank 3: no clock record; placed by the system clocks, with unknown error",)
    # The header of every file has the same system time at the same moment; only the drift remains.
    assert abs(min(row[5] for row in rows(timeline, 3)) - min(record[5] for record in records[3])) < 100_000


def test_a_rank_that_nothing_can_place_is_left_out_and_said(run):
    paths, _ = run
    without_clock(paths[3])
    paths[0].unlink()
    timeline = read_run(paths)
    assert timeline.ranks == [1, 2]
    assert timeline.notes[-1] == "rank 3: no clock record, and no file of rank 0 to align it with; left out"


def test_names_that_are_not_known_come_last_and_keep_their_events(tmp_path: Path):
    header = {"version": 1, "rank": 0, "host": "h", "monotonic_ns": 0, "unix_ns": 0}
    text = json.dumps({**header, "names": ["<new>", "forward-compute"]}).encode()
    records = np.zeros(2, RECORD)
    records["name"] = [0, 1]
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(b"TDPPEVT1" + struct.pack("<I", len(text)) + text + records.tobytes())
    timeline = read_run({0: path})
    assert timeline.names == ("forward-compute", "<new>")
    assert timeline.events["name"].tolist() == ["<new>", "forward-compute"]
    assert {key: timeline.events[key].dtype for key in EVENT.names[2:]} == {key: EVENT[key] for key in EVENT.names[2:]}


TIMES = st.integers(0, 10**16)


@given(
    start=TIMES, length=st.integers(1, 10**13), first=st.integers(-(10**15), 10**15), drift=st.integers(-(10**9), 10**9)
)
def test_the_offset_is_exact_at_clock_records_linear_between_and_held_outside(start, length, first, drift):
    clock = np.zeros(2, RECORD)
    clock["start_ns"] = [start, start + length]
    clock["end_ns"] = [start + first, start + length + first + drift]
    records = np.zeros(5, RECORD)
    records["start_ns"] = [start - 10, start, start + length // 2, start + length, start + length + 10]
    records["end_ns"] = records["start_ns"]
    offset = aligned(records, clock)["start_ns"] - records["start_ns"]
    between = first + drift * (length // 2) / length
    assert offset[[0, 1, 3, 4]].tolist() == [first, first, first + drift, first + drift]
    assert abs(offset[2] - between) <= 1
