"""Columns of integers as text in a page: small, exact, and quick to read in a browser.

A column is zigzag-coded (0, -1, 1, -2 … become 0, 1, 2, 3 …) and cut into byte planes (the lowest bytes of all
values, then the next …), for planes compress better than whole numbers. The planes of all columns are one zlib
stream, in base64. `static/unpack.js` is the inverse.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fasop.simulation.predict import Prediction
from reports.path.critical import Segment

EXACT = 1 << 52
"""Zigzag-coded values below 2**53 are exact in JavaScript, so that plain ones must be nearer to 0 than this."""


@dataclass(frozen=True)
class Packed:
    """Columns for a page."""

    layout: list[tuple[str, int, int]]
    """Name, number of values and bytes per value of each column, in the order of the stream."""
    text: str
    """The stream in base64."""


def pack(columns: Mapping[str, NDArray[Any]]) -> Packed:
    """Packs columns of integers. Raises ValueError: a value needs more than 53 bits with its sign."""
    layout, planes = [], []
    for name, column in columns.items():
        values = np.ascontiguousarray(column, "<i8")
        coded = ((values << 1) ^ (values >> 63)).view("<u8")
        largest = int(coded.max()) if len(coded) else 0
        if largest >= 2 * EXACT:
            raise ValueError(f"column {name!r} holds a value beyond +-2**52, which a browser cannot hold exactly")
        width = max(1, (largest.bit_length() + 7) // 8)
        layout.append((name, len(values), width))
        planes.append(coded.view("u1").reshape(-1, 8)[:, :width].T.tobytes())
    return Packed(layout, base64.b64encode(zlib.compress(b"".join(planes), 6)).decode("ascii"))


def event_columns(events: pd.DataFrame, ranks: int, waiting_ns: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The events of a run (`Timeline.events`) as columns that pack well.

    Times count from the run's first event. `gap` is a start less the end of the rank's event before (of the
    first: less 0), which is small; iterations are differences as well. `count` is the number of events of each
    rank, in whose order they come.

    Args:
        waiting_ns: (events,) the part of each that is waiting, -1 where it is not known.
    """
    origin = events["start_ns"].min() if len(events) else 0
    start, end = events["start_ns"] - origin, events["end_ns"] - origin
    before = end.groupby(events["rank"]).shift(fill_value=0)
    return {
        "count": np.bincount(events["rank"], minlength=ranks),
        "name": events["name"].cat.codes.to_numpy(),
        "iteration": np.diff(events["iteration"], prepend=0),
        **{key: events[key].to_numpy() for key in ("chunk", "micro_batch", "peer")},
        "gap": (start - before).to_numpy(),
        "duration": (end - start).to_numpy(),
        "waiting": waiting_ns,
    }


def path_columns(path: Sequence[Segment], events: pd.DataFrame) -> dict[str, NDArray[Any]]:
    """The parts of a critical path; times in ns from the first event of its iteration, the name -1 where nothing was
    recorded. Neighbours in one event are one part."""
    parts: list[list[int]] = []
    for one in path:
        if parts and one.event >= 0 and parts[-1][0] == one.event and parts[-1][1] == one.rank:
            parts[-1][3] = one.end_ns
        else:
            parts.append([one.event, one.rank, one.start_ns, one.end_ns])
    of_event, rank, start, end = np.array(parts, np.int64).reshape(-1, 4).T
    iteration = events["iteration"].iloc[of_event.max()] if len(of_event) else 0
    origin = events["start_ns"][events["iteration"] == iteration].min()
    codes = events["name"].cat.codes.to_numpy(np.int64)
    return {
        "path_rank": rank,
        "path_start": start - origin,
        "path_duration": end - start,
        "path_name": np.where(of_event >= 0, codes[of_event], -1),
    }


def predicted_columns(predictions: Sequence[Prediction], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The events of an iteration as predicted, one prediction after the other; times in ns from its start."""
    events = [event for one in predictions for event in one.events]
    start, end = (np.rint([1e9 * getattr(event, key) for event in events]) for key in ("start", "end"))
    columns = {
        "stage": [event.stage for event in events],
        "name": [names.index(event.kind) for event in events],
        "chunk": [event.chunk for event in events],
        "micro_batch": [event.micro_batch for event in events],
        "start": start,
        "duration": end - start,
        "waiting": np.rint([1e9 * wait for one in predictions for wait in one.waiting]),
    }
    return {f"predicted_{key}": np.array(column, np.int64) for key, column in columns.items()}
