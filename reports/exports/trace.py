"""A run as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A process per rank, a thread per lane. Times are whole microseconds from the run's first event, the unit of the format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU); both ends are rounded, so that
what followed or held another event still does. Messages are flows from the send to the receive, and each rank has the
counters of `reports/exports/counters.py`.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from reports.exports.counters import counts
from reports.facts.waits import Integers, message_pairs
from reports.readers.events import Timeline
from reports.readers.record import Record, rank_label

LANES = ("computation", "send", "receive and all-reduce", "data and loss")
_COMPUTATION, _SEND, _RECEIVE, _DATA = range(len(LANES))
FLOW = "message"
"""The category of flows. Two ends of a flow have it, their name and their id in common."""


def lane(name: str) -> int:
    """Index into LANES of a task."""
    if (name.endswith("-compute") and name != "loss-compute") or name.split("-")[0] == "optimizer":
        return _COMPUTATION
    if name.endswith("-send"):
        return _SEND
    if name.endswith(("-recv", "-all-reduce", "-reduce-scatter", "-all-gather")):
        return _RECEIVE
    return _DATA


def chrome_trace(record: Record, timeline: Timeline) -> bytes:
    """The trace, compressed with gzip."""
    lines = ",\n".join([*_named(record), *(_events(record, timeline) if len(timeline.events) else ())])
    return gzip.compress(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode(), 6, mtime=0)


def _named(record: Record) -> Iterator[str]:
    """Names of processes and threads, in the order of ranks and lanes."""
    for rank in record.plan.ranks:
        name = f"{rank_label(rank)} · {record.plan.node_of(rank.rank)}"
        yield _metadata("process_name", rank.rank, 0, {"name": name})
        yield _metadata("process_sort_index", rank.rank, 0, {"sort_index": rank.rank})
        for index, title in enumerate(LANES):
            yield _metadata("thread_name", rank.rank, index, {"name": title})
            yield _metadata("thread_sort_index", rank.rank, index, {"sort_index": index})


def _metadata(kind: str, rank: int, tid: int, content: dict[str, str | int]) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": content}, ensure_ascii=False)


def _events(record: Record, timeline: Timeline) -> Iterator[str]:
    """A complete event per line, each followed by the ends of its flows, then the counters.

    What overlaps another event of its lane, without lying inside it, has a lane beside it. Perfetto attaches the end of
    a flow to the event that began last on its thread, so that an event of no length needs it on the next line.
    """
    events = timeline.events
    start, end = (_microseconds(timeline, events[key].to_numpy()) for key in ("start_ns", "end_ns"))
    pairs = message_pairs(timeline, record.plan.ranks)
    ends = _flows(pairs, start, end)
    names = [json.dumps(name, ensure_ascii=False) for name in timeline.names]
    lanes = [lane(name) for name in timeline.names]
    columns = ("rank", "iteration", "micro_batch", "chunk", "peer")
    open_until: dict[tuple[int, int], list[int]] = {}
    for event, (name, rank, iteration, micro_batch, chunk, peer, ts, until) in enumerate(
        zip(
            events["name"].cat.codes,
            *(events[column].tolist() for column in columns),
            start.tolist(),
            end.tolist(),
            strict=True,
        )
    ):
        tid = lanes[name]
        while not _fits(open_until.setdefault((rank, tid), []), ts, until):
            tid += len(LANES)
        more = f', "micro-batch": {micro_batch}, "chunk": {chunk}' if micro_batch >= 0 else ""
        more += f', "peer": {peer}' if peer >= 0 else ""
        yield (
            f'{{"ph": "X", "name": {names[name]}, "pid": {rank}, "tid": {tid}, "ts": {ts}, "dur": {until - ts}, '
            f'"args": {{"iteration": {iteration}{more}}}}}'
        )
        for flow in ends.get(event, ()):
            yield f'{{{flow}, "cat": "{FLOW}", "pid": {rank}, "tid": {tid}}}'
    for count in counts(timeline, pairs):
        at_us = _microseconds(timeline, count.at_ns).tolist()
        for rank, at, value in zip(count.rank.tolist(), at_us, count.value.tolist(), strict=True):
            yield (
                f'{{"ph": "C", "name": "{count.name}", "pid": {rank}, "tid": 0, "ts": {at}, '
                f'"args": {{"{count.unit}": {value}}}}}'
            )


def _microseconds(timeline: Timeline, times: Integers) -> Integers:
    return np.asarray((times - timeline.events["start_ns"].min() + 500) // 1000)


def _flows(pairs: Sequence[tuple[Integers, Integers]], start: Integers, end: Integers) -> Mapping[int, Sequence[str]]:
    """By event, what begins and ends at it: a flow begins with its send, and ends within its receive.

    A message that seems to have come before it was sent, because clocks differ, has none.
    """
    found = defaultdict(list)
    number = 0
    for way, (receives, sends) in zip(("forward", "backward"), pairs, strict=True):
        for receive, send in zip(receives.tolist(), sends.tolist(), strict=True):
            sent, last = int(start[send]), int(end[receive])
            arrives = max(last - 1, int(start[receive]), sent)
            if arrives > last:
                continue
            number += 1
            found[send].append(f'"ph": "s", "name": "{way}", "id": {number}, "ts": {sent}')
            found[receive].append(f'"ph": "f", "bp": "e", "name": "{way}", "id": {number}, "ts": {arrives}')
    return found


def _fits(open_until: list[int], start: int, end: int) -> bool:
    """Whether an event lies after or inside those that a lane has open; if so it is opened there."""
    while open_until and open_until[-1] <= start:
        open_until.pop()
    if open_until and end > open_until[-1]:
        return False
    open_until.append(end)
    return True
