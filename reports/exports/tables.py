"""A run as tables for other programs: its events, and its logged iterations (docs/reports.md)."""

from __future__ import annotations

import csv
import io

from reports.readers.events import Timeline
from reports.readers.record import Record

EVENTS = (
    "rank",
    "stage",
    "dp",
    "tp",
    "node",
    "task",
    "iteration",
    "micro_batch",
    "chunk",
    "peer",
    "start_ns",
    "end_ns",
)


def events_csv(record: Record, timeline: Timeline) -> str:
    """A line per event, by rank and start; times in ns from the run's first event; empty for what there is not."""
    events = timeline.events
    origin = int(events["start_ns"].min()) if len(events) else 0
    told = {rank.rank: (rank.rank, rank.stage, rank.dp, rank.tp, rank.node) for rank in record.plan.ranks}
    ranks = [told[rank] for rank in events["rank"].tolist()]
    names = [timeline.names[name] for name in events["name"].tolist()]
    numbers = [
        ["" if number < 0 else number for number in events[key].tolist()] for key in ("micro_batch", "chunk", "peer")
    ]
    times = [(events[key] - origin).tolist() for key in ("start_ns", "end_ns")]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(EVENTS)
    table.writerows(
        (*rank, name, *rest)
        for rank, name, *rest in zip(ranks, names, events["iteration"].tolist(), *numbers, *times, strict=True)
    )
    return text.getvalue()


def metrics_csv(record: Record) -> str:
    """A line per logged iteration, a column per figure that any of them has; empty for what there is not."""
    columns = list(dict.fromkeys(key for line in record.metrics for key in line))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(dict(line) for line in record.metrics)
    return text.getvalue()
