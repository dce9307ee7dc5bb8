"""Traces of real runs are valid, and their messages and counters are those of the raw files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from launch.commands.report import main
from reports.exports import lane
from tests.support.reports.layouts import LAYOUTS, run_of
from tests.support.reports.raw_events import Raw, raw_events, sends
from tests.support.reports.trace_format import Event, checked, flows

pytestmark = pytest.mark.slow
BACKWARD = ("backward-compute", "backward-weight-compute")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_joins_every_send_to_its_receive_and_counts_what_is_held(name: str, layouts: Path):
    one, run = LAYOUTS[name], run_of(name, layouts)
    main([str(run), "--trace"])
    trace = checked((run / "report/trace.json.gz").read_bytes())
    raw = raw_events(run, one.ranks)
    origin = min(event.start for event in raw)

    def key(event: Raw) -> tuple[object, ...]:
        return event.rank, event.name, event.iteration, event.micro_batch, event.chunk, event.peer

    def told(event: Event) -> tuple[object, ...]:
        args = event["args"]
        return event["pid"], event["name"], args["iteration"], args["micro-batch"], args["chunk"], args["peer"]

    joined = Counter((told(send), told(receive)) for send, receive in flows(trace))
    assert joined == Counter((key(send), key(receive)) for receive, send in sends(raw, one.stages).items())
    assert (one.stages > 1) == bool(joined)
    for title, unit in (("micro-batches", "held"), ("messages to this rank", "under way")):
        for rank in range(one.ranks):
            counted = [
                event for event in trace if event["ph"] == "C" and (event["name"], event["pid"]) == (title, rank)
            ]
            at = [((time - origin + 500) // 1000, by) for time, by in changed(raw, rank, one.stages, unit)]
            assert {event["ts"]: event["args"] for event in counted} == {
                ts: {unit: sum(by for time, by in at if time <= ts)} for ts, _ in at
            }
    assert all(lane(event["name"]) == event["tid"] % 4 for event in trace if event["ph"] == "X")


def changed(raw: list[Raw], rank: int, stages: int, unit: str) -> list[tuple[int, int]]:
    """When a count of a rank changes, and by how much."""
    if unit == "under way":
        found = [(send.start, receive.end) for receive, send in sends(raw, stages).items() if receive.rank == rank]
    else:
        own = [event for event in raw if event.rank == rank]
        found = []
        for event in own:
            if event.name == "forward-compute":
                same = [
                    other.end
                    for other in own
                    if other.name in BACKWARD
                    and other.start >= event.end
                    and (other.micro_batch, other.chunk) == (event.micro_batch, event.chunk)
                ]
                found.append((event.start, min(same)))
    return [change for start, end in found for change in ((start, 1), (end, -1))]
