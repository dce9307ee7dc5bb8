"""What `tdpp report` writes beside the pages when asked: a trace, tables, a picture."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from conf.rundir import write_atomic
from reports import picture
from reports.sources import Found
from reports.tables import events_csv, metrics_csv
from reports.trace import chrome_trace


class Export(StrEnum):
    trace = "trace"
    csv = "csv"
    png = "png"


def write_exports(wanted: Collection[Export], found: Found, page: Path, browser: str | None) -> list[Path]:
    """Writes what is wanted beside the timeline's page; returns where.

    Args:
        browser: takes the picture, if one is wanted.

    Raises:
        ReportError: the browser made no picture.
    """
    record, timeline = found.record, found.timeline
    folder, written = page.parent, list[Path]()
    if Export.trace in wanted:
        written.append(folder / "trace.json.gz")
        written[-1].write_bytes(chrome_trace(record, timeline))
    if Export.csv in wanted:
        for name, text in (("events.csv", events_csv(record, timeline)), ("metrics.csv", metrics_csv(record))):
            written.append(folder / name)
            write_atomic(written[-1], text)
    if Export.png in wanted and browser is not None:
        written.append(folder / "timeline.png")
        picture.take(browser, page, written[-1])
    return written
