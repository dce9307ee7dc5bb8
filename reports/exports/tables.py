"""A run as tables for other programs: its events, and its logged iterations (docs/reports.md)."""

from __future__ import annotations

from reports.facts.frames import events_frame
from reports.readers.events import Timeline
from reports.readers.record import Record


def events_csv(record: Record, timeline: Timeline) -> str:
    """A line per event, as `events_frame`; empty for what there is not."""
    return str(events_frame(record, timeline).to_csv(index=False, lineterminator="\n"))


def metrics_csv(record: Record) -> str:
    """A line per logged iteration, a column per figure that any of them has; empty for what there is not."""
    return str(record.metrics.to_csv(index=False, lineterminator="\n"))
