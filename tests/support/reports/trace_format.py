"""What the Trace Event Format demands of a trace of complete, flow, counter and metadata events, and how Perfetto reads
flows. https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
KEYS = {
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
    "M": {"ph", "name", "pid", "tid", "args"},
}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
UNITS = {"ms", "ns"}


def checked(trace: bytes) -> list[Event]:
    """The events of a trace in the format; fails with the first that is not as the format has it."""
    document = json.loads(gzip.decompress(trace), object_pairs_hook=_once)
    assert set(document) == {"displayTimeUnit", "traceEvents"} and document["displayTimeUnit"] in UNITS
    events: list[Event] = document["traceEvents"]
    named = set()
    for event in events:
        kind = event["ph"]
        assert set(event) == KEYS[kind], event
        assert isinstance(event["name"], str) and event["name"], event
        assert type(event["pid"]) is int and type(event["tid"]) is int, event
        if kind == "M":
            key, of = METADATA[event["name"]]
            assert set(event["args"]) == {key} and type(event["args"][key]) is of, event
            named.add((event["pid"], event["name"]))
            continue
        assert type(event["ts"]) is int and event["ts"] >= 0, event
        if kind == "X":
            assert type(event["dur"]) is int and event["dur"] >= 0, event
            assert all(type(value) is int for value in event["args"].values()), event
        elif kind == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values()), event
        else:
            assert type(event["id"]) is int and event["id"] > 0 and isinstance(event["cat"], str), event
            assert event.get("bp", "e") == "e"
    assert {event["pid"] for event in events} == {pid for pid, name in named if name == "process_name"}
    return events


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key stands twice in {pairs}"
    return found


def flows(events: list[Event]) -> list[tuple[Event, Event]]:
    """The complete events that each flow joins. By the format's rule an end lies within its event; as Perfetto reads
    them, in the order of times and else of lines, it is on the event that began last on its thread."""
    begun: dict[tuple[int, int], Event] = {}
    ends: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in sorted((one for one in events if one["ph"] in "Xsf"), key=lambda one: one["ts"]):
        thread = event["pid"], event["tid"]
        if event["ph"] == "X":
            begun[thread] = event
            continue
        around = begun[thread]
        assert around["ts"] <= event["ts"] <= around["ts"] + around["dur"], (event, around)
        found = ends[event["cat"], event["name"], event["id"]]
        assert len(found) == (event["ph"] == "f"), "a flow begins once, before it ends, and ends once"
        found.append(around)
    assert all(len(one) == 2 for one in ends.values())
    return [(one, other) for one, other in ends.values()]
