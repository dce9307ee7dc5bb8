"""A run as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A process per rank, a thread per lane. Times are whole microseconds from the run's first event, the unit of the format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU); both ends are rounded, so that
what followed or held another event still does.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pandas as pd

from reports.readers.events import Timeline
from reports.readers.record import Record, rank_label

LANES = ("computation", "send", "receive and all-reduce", "data and loss")
_COMPUTATION, _SEND, _RECEIVE, _DATA = range(len(LANES))


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
    lines = ",\n".join([*_named(record), *_events(timeline)])
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


def _events(timeline: Timeline) -> Iterator[str]:
    """A complete event per line. What overlaps another of its lane, without lying inside it, has a lane beside it."""
    events = timeline.events
    if not len(events):
        return
    start = _microseconds(events["start_ns"], events["start_ns"].min())
    duration = _microseconds(events["end_ns"], events["start_ns"].min()) - start
    names = [json.dumps(name, ensure_ascii=False) for name in timeline.names]
    lanes = [lane(name) for name in timeline.names]
    columns = ("rank", "iteration", "micro_batch", "chunk", "peer")
    open_until: dict[tuple[int, int], list[int]] = {}
    for name, rank, iteration, micro_batch, chunk, peer, ts, dur in zip(
        events["name"].cat.codes, *(events[column].tolist() for column in columns), start, duration, strict=True
    ):
        tid = lanes[name]
        while not _fits(open_until.setdefault((rank, tid), []), ts, ts + dur):
            tid += len(LANES)
        more = f', "micro-batch": {micro_batch}, "chunk": {chunk}' if micro_batch >= 0 else ""
        more += f', "peer": {peer}' if peer >= 0 else ""
        yield (
            f'{{"ph": "X", "name": {names[name]}, "pid": {rank}, "tid": {tid}, "ts": {ts}, "dur": {dur}, '
            f'"args": {{"iteration": {iteration}{more}}}}}'
        )


def _microseconds(times: pd.Series, origin: int) -> pd.Series:
    return (times - origin + 500) // 1000


def _fits(open_until: list[int], start: int, end: int) -> bool:
    """Whether an event lies after or inside those that a lane has open; if so it is opened there."""
    while open_until and open_until[-1] <= start:
        open_until.pop()
    if open_until and end > open_until[-1]:
        return False
    open_until.append(end)
    return True
