"""What `tdpp report` writes beside the pages when asked: a trace, tables, a picture."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

import pandas as pd

from megatron_ext.contract.files import write_atomic
from reports.errors import unwritable
from reports.exports.trace import chrome_trace
from reports.facts.frames import events_frame
from reports.figures import picture
from reports.sources import Found


class Export(StrEnum):
    trace = "trace"
    csv = "csv"
    png = "png"


def write_exports(wanted: Collection[Export], found: Found, page: Path, browser: str | None) -> list[Path]:
    """Writes what is wanted beside the timeline's page; returns where.

    Args:
        browser: takes the picture, if one is wanted.

    Raises:
        ReportError: a file cannot be written, or the browser made no picture.
    """
    record, timeline = found.record, found.timeline
    folder, written = page.parent, list[Path]()
    if Export.trace in wanted:
        written.append(_written(folder / "trace.json.gz", chrome_trace(record, timeline)))
    if Export.csv in wanted:
        written.append(_written(folder / "events.csv", _csv(events_frame(record, timeline))))
        written.append(_written(folder / "metrics.csv", _csv(record.metrics)))
    if Export.png in wanted and browser is not None:
        written.append(_written(folder / "timeline.png", picture.take(browser, page)))
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
