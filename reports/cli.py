"""`tdpp report`: writes the pages of runs into their folders."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from conf.errors import RunFolderError
from conf.reading.values import Parser, option, whole
from conf.run_folder.rundir import RunDir, write_atomic
from conf.visible import visible
from reports.errors import NeitherError, unwritable
from reports.exports.write import Export, write_exports
from reports.facts import statistics
from reports.figures import picture
from reports.figures.page import refreshing
from reports.pages import run_page, timeline_page
from reports.pages.several import Compared, all_of, compare
from reports.readers.judgement import Findings, Verdict
from reports.readers.megatron_log import Sizes
from reports.sources import Found, Source, placed

Judge = Callable[[RunDir], Findings]
Given = TypeVar("Given")
Made = TypeVar("Made")
REFRESH_S = 5
"""Between two pages of a run that goes on; longer where writing them takes more than a tenth of it."""


@dataclass(frozen=True, kw_only=True)
class Written:
    found: Found
    pages: tuple[Path, Path]
    verdict: Verdict | None
    over: bool
    """Whether nothing more will come."""


def main(argv: list[str], judge: Judge | None = None) -> int:
    """Writes `report/index.html` and `report/timeline.html` of each run, of several a comparison; prints their paths.

    Args:
        argv: arguments after `tdpp report`.
        judge: gives the verdict on a run, and what its nodes say; without it the page has neither.

    Raises:
        TdppError: a run cannot be found or has no usable plan, or a file is no log; of several files and folders those
            that are neither are left out, and named on stderr, unless all are.
    """
    arguments = _parser().parse_args(argv)
    sizes = Sizes(tensor=arguments.tensor, data=arguments.data, pipeline=arguments.pipeline)
    exports = [export for export in Export if getattr(arguments, export)]
    browser = picture.browser() if Export.png in exports else None
    wanted: list[str | None] = [one for given in arguments.runs for one in all_of(given)] or [None]
    told = set[str]()
    sources = _those_that_are(lambda one: Source.find(arguments.runs_dir, one, sizes), wanted, told)
    if arguments.output is not None:
        sources = placed(sources, arguments.output)
    if arguments.watch:
        watch(sources, judge, told, arguments.output)
    rounds = write_all(sources, judge, told)
    for written in rounds:
        for path in written.pages if not arguments.watch else ():
            print(path)
        for path in write_exports(exports, written.found, written.pages[1], browser):
            print(path)
    for path in compared(rounds, arguments.output):
        if not arguments.watch:
            print(path)
    return 0


def watch(sources: Sequence[Source], judge: Judge | None, told: set[str], output: Path | None) -> None:
    """Writes the pages, which then load themselves anew, again and again until nothing more will come."""
    waits, shown = REFRESH_S, False
    while True:
        began = time.monotonic()
        rounds = write_all(sources, judge, told, refresh_s=waits)
        pages = [*(path for written in rounds for path in written.pages), *compared(rounds, output, refresh_s=waits)]
        for path in pages if not shown else ():
            print(path, flush=True)
        if all(written.over for written in rounds):
            return
        shown, waits = True, max(REFRESH_S, round(9 * (time.monotonic() - began)))
        time.sleep(waits)


def write_all(
    sources: Sequence[Source], judge: Judge | None, told: set[str], refresh_s: int | None = None
) -> list[Written]:
    """As `write`, of each; of several, a file that is no log is left out."""
    return _those_that_are(lambda source: write(source, judge, told, refresh_s), sources, told)


def _those_that_are(make: Callable[[Given], Made], given: Sequence[Given], told: set[str]) -> list[Made]:
    """What `make` makes of each; where it raises NeitherError, not of all, that one is named on stderr."""
    made, errors = list[Made](), list[NeitherError]()
    for one in given:
        try:
            made.append(make(one))
        except NeitherError as error:
            errors.append(error)
    if errors and not made:
        raise errors[0]
    for note in (f"left out: {error.brief}" for error in errors):
        if note not in told:
            print(visible(note), file=sys.stderr)
            told.add(note)
    return made


def compared(rounds: Sequence[Written], output: Path | None, refresh_s: int | None = None) -> list[Path]:
    """Writes the comparison, if there are several to compare, into a folder or where the runs are; returns where."""
    if len(rounds) == 1:
        return []
    runs = [Compared(record=one.found.record, verdict=one.verdict, page=one.pages[0]) for one in rounds]
    return [compare(runs, output, refresh_s)]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tdpp report", description="Write the pages of a run or of a Megatron-LM log: summary and timeline."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, name, job id or latest; a folder of runs: all of them; or a log of Megatron-LM, or the "
        "folder with the .out files of a job's nodes; without any, the latest run; several are also compared",
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write the pages again and again until the run is over; open ones load themselves anew",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write there, not into the run's folder; of several runs, each into a folder of its own there",
    )
    parser.add_argument("--trace", action="store_true", help="also a trace for Perfetto, trace.json.gz")
    parser.add_argument("--csv", action="store_true", help="also tables, events.csv and metrics.csv")
    parser.add_argument("--png", action="store_true", help="also a picture of the timeline; needs Chromium or Chrome")
    sizes = parser.add_argument_group("parallel sizes of a log that does not say them")
    for name in ("tensor", "data", "pipeline"):
        sizes.add_argument(f"--{name}", type=option(whole), metavar="N")
    return parser


def write(source: Source, judge: Judge | None, told: set[str], refresh_s: int | None = None) -> Written:
    """Writes both pages; says on stderr what they lack.

    Args:
        told: what was said before, and is not said again.
        refresh_s: after how many seconds the pages load themselves anew.
    """
    found = source.read()
    known, timeline = found.record, found.timeline
    figures = statistics.statistics(timeline, known.plan.ranks)
    findings = None
    if judge and source.run:
        try:
            findings = judge(source.run)
        except RunFolderError as error:
            known = replace(known, notes=(*known.notes, f"no verdict: {error}"))
    for note in (f"{known.name}: {note}" for note in (*known.notes, *timeline.notes)):
        if note not in told:
            print(visible(note), file=sys.stderr)
            told.add(note)
    index, all_ranks = source.report / "index.html", source.report / "timeline.html"
    over = found.over if source.run is None else findings is None or findings.over
    contents = (
        (index, run_page.render(known, timeline, figures, findings, found.prediction, found.gpus)),
        (all_ranks, timeline_page.render(known, timeline, figures, found.prediction)),
    )
    try:
        source.make_folder()
        for path, content in contents:
            write_atomic(path, content if refresh_s is None else refreshing(content, refresh_s))
    except OSError as error:
        raise unwritable(source.report, error) from error
    verdict = findings.verdict if findings else None
    return Written(found=found, pages=(index, all_ranks), verdict=verdict, over=over)
