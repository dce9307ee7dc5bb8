"""Writing the pages of runs and logs: each run's own, and the comparison of several."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from conf.errors import RunFolderError
from conf.run_folder.judgement import Findings, Verdict
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from megatron_ext.contract.files import write_atomic
from reports.errors import NeitherError, unwritable
from reports.facts import statistics
from reports.facts.side_by_side import busy
from reports.facts.statistics import time_of
from reports.figures.page import refreshing
from reports.pages import run_page, sweep_page, timeline_page
from reports.pages.comparison import outcome
from reports.path.links import Allowed
from reports.path.slow_ranks import Expected
from reports.path.why import Why, explain
from reports.sections.difference_section import Timed
from reports.sources import Found, Source

Judge = Callable[[RunDir], Findings]
Given = TypeVar("Given")
Made = TypeVar("Made")
COMPARISON = "comparison.html"
REFRESH_S = 5
"""Between two pages of a run that goes on; longer where writing them takes more than a tenth of it."""


@dataclass(frozen=True, kw_only=True)
class Written:
    run: RunDir | None
    """None for a log."""
    found: Found
    figures: statistics.Statistics
    pages: tuple[Path, Path]
    verdict: Verdict | None
    over: bool
    """Whether nothing more will come."""


def watch(sources: Sequence[Source], judge: Judge | None, printed: set[str], output: Path | None) -> None:
    """Writes the pages, which then load themselves anew, again and again until nothing more will come."""
    waits, shown = REFRESH_S, False
    while True:
        began = time.monotonic()
        rounds = write_all(sources, judge, printed, refresh_s=waits)
        pages = [*(path for written in rounds for path in written.pages), *compared(rounds, output, refresh_s=waits)]
        for path in pages if not shown else ():
            print(path, flush=True)
        if all(written.over for written in rounds):
            return
        shown, waits = True, max(REFRESH_S, round(9 * (time.monotonic() - began)))
        time.sleep(waits)


def write_all(
    sources: Sequence[Source], judge: Judge | None, printed: set[str], refresh_s: int | None = None
) -> list[Written]:
    """Writes the pages of each source; of several, a file that is not a log is left out."""
    return skip_unreadable(lambda source: write(source, judge, printed, refresh_s), sources, printed)


def skip_unreadable(make: Callable[[Given], Made], given: Sequence[Given], printed: set[str]) -> list[Made]:
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
        if note not in printed:
            print(visible(note), file=sys.stderr)
            printed.add(note)
    return made


def compared(runs: Sequence[Written], output: Path | None, refresh_s: int | None = None) -> list[Path]:
    """Writes the comparison into `output`, or the deepest folder that all the runs lie in, if there are several to
    compare; returns where. After `refresh_s` seconds the page loads itself anew. Raises ReportError: it cannot be
    written there."""
    if len(runs) == 1:
        return []
    folder = output or Path(os.path.commonpath([one.pages[0].absolute().parents[1] for one in runs]))
    links = [quote(os.path.relpath(one.pages[0].absolute(), folder.absolute())) for one in runs]
    outcomes = [
        outcome(one.found.record, one.verdict, link, one.found.prediction, one.found.busy)
        for one, link in zip(runs, links, strict=True)
    ]
    timed = [
        Timed(
            name=one.found.record.name,
            link=link,
            plan=one.found.record.plan,
            micro_batches=one.found.record.micro_batch_numbers,
            time=time_of(one.found.record),
            timeline=one.found.timeline,
            figures=one.figures,
        )
        for one, link in zip(runs, links, strict=True)
    ]
    try:
        _write_page(folder / COMPARISON, sweep_page.render(outcomes, timed), refresh_s)
    except OSError as error:
        raise unwritable(folder / COMPARISON, error) from error
    return [folder / COMPARISON]


def _write_page(path: Path, content: str, refresh_s: int | None) -> None:
    write_atomic(path, content if refresh_s is None else refreshing(content, refresh_s))


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The pages of a run or a log, as HTML."""

    found: Found
    figures: statistics.Statistics
    sections: Sequence[str]
    """Sections of the run's page."""
    timeline: str
    findings: Findings | None
    over: bool
    """Whether nothing more will come."""


def rendered(source: Source, judge: Judge | None, beside: run_page.Beside | None = None) -> Rendered:
    """Both pages, as far as there is something to show. Raises as `Source.read`. `beside`: what a served run is
    compared with."""
    findings, why_not = None, tuple[str, ...]()
    if judge and source.run:
        try:
            findings = judge(source.run)  # before its files are read: those of a run that is over are whole
        except RunFolderError as error:
            why_not = (f"no verdict: {error}",)
    found = source.read()
    known, timeline = replace(found.record, notes=(*found.record.notes, *why_not)), found.timeline
    figures = statistics.statistics(timeline, known.plan.ranks, known)
    predicted = Expected.of(found.prediction)
    cluster = known.experiment.cluster if known.experiment else None
    allowed = Allowed.of(known.plan, cluster, known.traffic)
    why = None if known.log else explain(timeline, known.plan, figures, found.searched, predicted, found.gpus, allowed)
    return Rendered(
        found=replace(found, record=known, busy=busy(figures, known.plan)),
        figures=figures,
        sections=run_page.sections(known, timeline, figures, findings, found.prediction, found.gpus, why, beside),
        timeline=timeline_page.render(
            known,
            timeline,
            figures,
            found.prediction,
            why if isinstance(why, Why) and not why.streams else None,
            findings,
        ),
        findings=findings,
        over=found.over if source.run is None else findings is None or findings.over,
    )


def write(source: Source, judge: Judge | None, printed: set[str], refresh_s: int | None = None) -> Written:
    """Writes both pages; says on stderr what they lack. `printed`: what was said before, and is not said again.
    `refresh_s`: after how many seconds the pages load themselves anew."""
    made = rendered(source, judge)
    known = made.found.record
    for note in (f"{known.name}: {note}" for note in (*known.notes, *made.found.timeline.notes)):
        if note not in printed:
            print(visible(note), file=sys.stderr)
            printed.add(note)
    index, all_ranks = source.report / "index.html", source.report / "timeline.html"
    try:
        source.make_folder()
        for path, content in ((index, run_page.render(known, made.sections)), (all_ranks, made.timeline)):
            _write_page(path, content, refresh_s)
    except OSError as error:
        raise unwritable(source.report, error) from error
    verdict = made.findings.verdict if made.findings else None
    return Written(
        run=source.run,
        found=made.found,
        figures=made.figures,
        pages=(index, all_ranks),
        verdict=verdict,
        over=made.over,
    )
