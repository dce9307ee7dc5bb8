"""The files of profilers that lie in a run's folder, and the iterations that they show."""

from __future__ import annotations

from html import escape

from reports.figures.page import Cell, Row, table
from reports.readers.profiles import ProfileFile
from reports.readers.record import Record


def profiles_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty without such a file."""
    if not record.profiles:
        return ""
    drawn = table(("file", "of", "iteration", "opens in"), [_row(one) for one in record.profiles])
    note = '<p class="note">The files are in the run&apos;s folder. A traced iteration takes longer than others.</p>'
    return f"<section><h2>Profiles</h2>{drawn}{note}</section>"


def _row(one: ProfileFile) -> Row:
    at = one.iteration
    shown = "all" if at is None else f'<a href="timeline.html#iteration={at}">{at} in the timeline</a>'
    return Cell(f"<code>{escape(one.path)}</code>"), one.of, Cell(shown), one.opener
