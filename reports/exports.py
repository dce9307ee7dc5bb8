"""What `tdpp report` writes beside the pages when asked: a trace, tables, a picture."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pandas as pd

from megatron_ext.contract.files import write_atomic
from reports.errors import ReportError, unwritable
from reports.facts.breakdown import BACKWARD, FORWARD, Integers, message_pairs
from reports.facts.frames import events_frame
from reports.readers.events import Timeline
from reports.readers.record import Record, rank_label
from reports.sources import Found


class Export(StrEnum):
    trace = "trace"
    csv = "csv"
    png = "png"


def write_exports(wanted: Collection[Export], found: Found, page: Path, browser: str | None) -> list[Path]:
    """Writes what is wanted beside the timeline's page; returns where. `browser`: takes the picture, if one is wanted.
    Raises ReportError: a file cannot be written, or the browser made no picture."""
    record, timeline = found.record, found.timeline
    folder, written = page.parent, list[Path]()
    if Export.trace in wanted:
        written.append(_written(folder / "trace.json.gz", chrome_trace(record, timeline)))
    if Export.csv in wanted:
        written.append(_written(folder / "events.csv", _csv(events_frame(record, timeline))))
        written.append(_written(folder / "metrics.csv", _csv(record.metrics)))
    if Export.png in wanted and browser is not None:
        written.append(_written(folder / "timeline.png", take(browser, page)))
    return written


def _csv(frame: pd.DataFrame) -> str:
    """A line per row; empty for what there is not."""
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _written(path: Path, content: str | bytes) -> Path:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


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
    pairs = message_pairs(timeline, record.plan.ranks, record.plan.stream is not None)
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
    """Returns by event what begins and ends at it: a flow begins with its send, and ends within its receive.

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


@dataclass(frozen=True, kw_only=True)
class Count:
    """A number of each rank, which is 0 before its first change."""

    name: str
    unit: str
    rank: Integers
    """(changes,) ascending."""
    at_ns: Integers
    """(changes,) on the timeline's clock, ascending for each rank, each time once."""
    value: Integers
    """(changes,) from then on."""


def counts(timeline: Timeline, pairs: Sequence[tuple[Integers, Integers]]) -> Iterator[Count]:
    """Yields the counters of a run. `pairs`: receives and the sends that they take
    (`reports.facts.breakdown.message_pairs`)."""
    events = timeline.events
    rank, start, end = (events[key].to_numpy(np.int64) for key in ("rank", "start_ns", "end_ns"))
    forward, backward = _held(events)
    yield _count("micro-batches", "held", rank[forward], start[forward], end[backward])
    receives, sends = (np.concatenate(side) for side in zip(*pairs, strict=True))
    sound = start[sends] <= end[receives]  # where clocks differ, a message may seem to come before it is sent
    receives, sends = receives[sound], sends[sound]
    yield _count("messages to this rank", "under way", rank[receives], start[sends], end[receives])


def _held(events: pd.DataFrame) -> tuple[Integers, Integers]:
    """The forward passes that have a backward pass, and the last part of each of these.

    The k-th forward pass of a micro-batch through a chunk of a rank belongs to its k-th backward pass.
    """
    keys = ["rank", "micro_batch", "chunk"]
    known = events[events["micro_batch"] >= 0]
    sides = []
    for names in (FORWARD, BACKWARD):
        some = known[known["name"].isin(list(names))]
        turn = some.groupby([*keys, some["name"].astype(str)], sort=False).cumcount()
        sides.append(some[keys].assign(turn=turn, event=some.index, end_ns=some["end_ns"]))
    forward, backward = sides
    last = backward.sort_values("end_ns", kind="stable").drop_duplicates([*keys, "turn"], keep="last")
    both = forward.merge(last, on=[*keys, "turn"])
    return both["event_x"].to_numpy(np.int64), both["event_y"].to_numpy(np.int64)


def _count(name: str, unit: str, rank: Integers, start: Integers, end: Integers) -> Count:
    """How many of these spans are open at a time."""
    changes = pd.DataFrame(
        {"rank": np.concatenate([rank, rank]), "at": np.concatenate([start, end]), "by": np.repeat([1, -1], len(rank))}
    )
    sums = changes.groupby(["rank", "at"])["by"].sum()
    value = sums.groupby(level="rank").cumsum().to_numpy(np.int64)
    return Count(
        name=name,
        unit=unit,
        rank=sums.index.get_level_values("rank").to_numpy(np.int64),
        at_ns=sums.index.get_level_values("at").to_numpy(np.int64),
        value=value,
    )


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, HEIGHT = 1440, 1600
LIMIT_S = 120


def browser_here() -> str:
    """The command of the browser. Raises ReportError: there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise ReportError(
            f"--png needs Chromium or Chrome, but none of {', '.join(BROWSERS)} is in PATH; install "
            f"one, or leave --png out"
        )
    return found


def take(command: str, page: Path) -> bytes:
    """The picture as PNG, as the page is when its scripts have drawn it. Raises ReportError: the browser made none."""
    with tempfile.TemporaryDirectory() as profile:
        picture = Path(profile, "picture.png")
        arguments = [
            command,
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses to run as root otherwise
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            "--virtual-time-budget=20000",
            f"--screenshot={picture}",
            page.absolute().as_uri(),
        ]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ReportError(f"{command} did not finish a picture of {page} within {LIMIT_S} s") from error
        if done.returncode or not picture.exists():
            message = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ReportError(f"{command} made no picture of {page} (exit code {done.returncode}): {message[0]}")
        return picture.read_bytes()
