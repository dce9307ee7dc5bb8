"""What a page holds is what was put in, to the last nanosecond."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.figures.pack import Packed, event_columns, pack
from reports.readers.events import EVENT, Timeline, frame

EXACT = st.integers(-(2**52) + 1, 2**52 - 1)


def unpacked(packed: Packed) -> dict[str, list[int]]:
    """The stream by its description in reports/figures/pack.py, without numpy."""
    stream = zlib.decompress(base64.b64decode(packed.text))
    columns, at = {}, 0
    for name, length, width in packed.layout:
        planes = [stream[at + plane * length : at + (plane + 1) * length] for plane in range(width)]
        coded = [sum(plane[i] << (8 * k) for k, plane in enumerate(planes)) for i in range(length)]
        columns[name] = [-(value + 1) // 2 if value % 2 else value // 2 for value in coded]
        at += length * width
    assert at == len(stream)
    return columns


def restored(columns: dict[str, list[int]]) -> list[tuple[int, ...]]:
    """Rows of EVENT with times from the first event."""
    rows, at, iteration = [], 0, 0
    for rank, count in enumerate(columns["count"]):
        end = 0
        for i in range(at, at + count):
            iteration += columns["iteration"][i]
            start = end + columns["gap"][i]
            end = start + columns["duration"][i]
            what = (columns[key][i] for key in ("micro_batch", "peer"))
            rows.append((rank, columns["name"][i], columns["chunk"][i], iteration, *what, start, end))
        at += count
    return rows


@given(st.dictionaries(st.text(max_size=5), st.lists(EXACT, max_size=40), max_size=4))
def test_columns_come_back_exactly(columns):
    assert unpacked(pack({name: np.array(values, "i8") for name, values in columns.items()})) == columns


@pytest.mark.parametrize("value", [2**52, -(2**52) - 1], ids=["above", "below"])
def test_a_value_that_a_browser_cannot_hold_is_refused(value: int):
    with pytest.raises(ValueError, match=r"column 'gap' holds a value beyond \+-2\*\*52"):
        pack({"gap": np.array([value])})


ROWS = st.tuples(
    st.integers(0, 5),
    st.integers(0, 11),
    st.integers(0, 2**16 - 1),
    st.integers(1, 2**32 - 1),
    st.integers(-1, 2**31 - 1),
    st.integers(-1, 2**31 - 1),
    st.integers(0, 2**50),
    st.integers(0, 2**50),
)


@given(st.lists(ROWS, max_size=60))
def test_events_come_back_exactly_with_times_from_the_first(rows):
    events = np.array([(*row[:7], row[6] + row[7]) for row in rows], EVENT)
    events = np.sort(events, order=["rank", "start_ns"])
    names = [f"task {number}" for number in range(12)]
    timeline = Timeline(events=frame(events, names), hosts={}, uncertainty_ns=0, notes=())
    events["name"] = timeline.events["name"].cat.codes
    origin = events["start_ns"].min() if rows else 0
    events["start_ns"] -= origin
    events["end_ns"] -= origin
    waits = np.arange(len(rows)) - 1
    columns = unpacked(pack(event_columns(timeline.events, 6, waits)))
    assert restored(columns) == events.tolist()
    assert columns["waiting"] == waits.tolist()
    assert columns["waiting"] == waits.tolist()
