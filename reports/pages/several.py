"""Several runs at once: which they are, and where their comparison is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from conf.run_folder import run_folders
from conf.run_folder.rundir import RunDir
from megatron_ext.contract.files import write_atomic
from reports.errors import unwritable
from reports.figures.page import refreshing
from reports.pages import sweep_page
from reports.pages.comparison import outcome
from reports.readers.judgement import Verdict
from reports.readers.record import Record

PAGE = "comparison.html"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run or a log, and its own page."""

    record: Record
    verdict: Verdict | None
    page: Path


def all_of(wanted: str) -> list[str]:
    """The runs in a folder of runs, such as `runs/tiny`, oldest first; else what was given."""
    folder = Path(wanted)
    inside = [] if RunDir.is_one(folder) else run_folders.entries(folder)
    return [str(path) for path in sorted(inside) if RunDir.is_one(path)] or [wanted]


def compare(runs: Sequence[Compared], output: Path | None, refresh_s: int | None = None) -> Path:
    """Writes the comparison.

    Args:
        output: where to; None for the deepest folder that all the runs lie in.
        refresh_s: after how many seconds the page loads itself anew.

    Raises:
        ReportError: it cannot be written there.
    """
    folder = output or Path(os.path.commonpath([one.page.absolute().parents[1] for one in runs]))
    links = [quote(os.path.relpath(one.page.absolute(), folder.absolute())) for one in runs]
    outcomes = [outcome(one.record, one.verdict, link) for one, link in zip(runs, links, strict=True)]
    content = sweep_page.render(outcomes)
    try:
        write_atomic(folder / PAGE, content if refresh_s is None else refreshing(content, refresh_s))
    except OSError as error:
        raise unwritable(folder / PAGE, error) from error
    return folder / PAGE
