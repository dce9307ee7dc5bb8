"""What the server shows: the list of the runs, the pages of each, and comparisons. Everything is made on demand.

What draws pages is imported when the first one is made: importing it takes a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import quote

from conf.errors import TdppError
from conf.run_folder import run_folders
from conf.run_folder.rundir import RunDir
from launch.commands.run_arguments import Filter
from launch.commands.runs import Listed, listed
from launch.judge.findings import all_findings
from launch.judge.progress import outlook, time_of
from launch.judge.state import EXIT_CODES, State
from launch.judge.status_text import more_cells, run_row
from launch.screen import SLURM_S

if TYPE_CHECKING:
    from reports.pages.comparison import Outcome
    from reports.pages.runs_page import RunLine
    from reports.readers.record import Record


PAGES = 16
"""Runs whose pages are kept; with their figures they take megabytes."""
MOST_BEFORE = 8
"""Earlier runs that are looked at for one that has logged something."""
OUTCOMES = 256
"""Runs of which is kept what a comparison shows."""


@dataclass(frozen=True, kw_only=True)
class _Pages:
    record: Record
    sections: Sequence[str]
    timeline: str
    over: bool
    unix: float
    """When they were made."""


class Library:
    """The runs of a folder, as pages. Threads may ask at the same time."""

    def __init__(self, runs: Path, wanted: Sequence[str] = ()) -> None:
        self._runs = runs
        self._filter = Filter(words=tuple(wanted))
        self._pages = Kept[_Pages](self._made, lambda pages: pages.over, PAGES)
        self._records: Kept[Record] = Kept(_record, lambda _: True, PAGES)
        self._outcomes: Kept[tuple[Outcome, bool]] = Kept(_outcome, lambda made: made[1], OUTCOMES)
        self._lock = threading.Lock()
        self._list: tuple[float, float, list[Listed]] | None = None

    def check(self) -> None:
        """Raises RunFolderError if one of the runs that are wanted is none."""
        self._filter.chosen(self._runs, RunDir.everything(self._runs))

    def named(self, name: str) -> RunDir | None:
        """A run of the list, by its name; nothing else leads to a folder."""
        found = self._filter.chosen(self._runs, list(RunDir.all(self._runs)))
        return next((run for run in found if run.name == name and RunDir.is_one(run.path)), None)

    def overview(self) -> str:
        """The list of the runs, the latest first."""
        from reports.figures.page import refreshing
        from reports.pages import runs_page

        runs, seconds = self._listed()
        lines = [_line(run) for run in reversed(runs) if not run.closed]
        return refreshing(runs_page.render(lines, str(self._runs.absolute())), round(seconds))

    def index(self, run: RunDir) -> str:
        """Raises TdppError where no page can be made."""
        from reports.pages import run_page

        pages, seconds = self._pages.of(run)
        follows = None if pages.over else run_page.Follows(seconds=seconds, unix=pages.unix)
        return run_page.render(pages.record, pages.sections, follows)

    def now(self, run: RunDir, known: Collection[str]) -> str:
        """What has changed on the run's page, as JSON for `reports/static/live.js`: `over`, `seconds` until it may ask
        again, `unix`, and of all parts their `digest` and, but for those that are `known`, their `html`. Raises as
        `index`."""
        from reports.pages.run_page import digest

        pages, seconds = self._pages.of(run)
        parts = [
            {"digest": (name := digest(part)), **({} if name in known else {"html": part})} for part in pages.sections
        ]
        return json.dumps({"over": pages.over, "seconds": seconds, "unix": pages.unix, "parts": parts})

    def timeline(self, run: RunDir) -> str:
        """Raises as `index`."""
        pages, seconds = self._pages.of(run)
        return _following(pages.timeline, pages.over, seconds)

    def comparison(self, runs: Sequence[RunDir]) -> str:
        """Raises as `index`."""
        from reports.pages import sweep_page

        made = [self._outcomes.of(run) for run in runs]
        page = sweep_page.render([found for (found, _), _ in made])
        return _following(page, all(over for (_, over), _ in made), max(seconds for _, seconds in made))

    def _made(self, run: RunDir) -> _Pages:
        from reports.pages.run_page import Beside
        from reports.pages.writing import rendered
        from reports.readers.megatron_log import Sizes
        from reports.sources import Source

        unix, before = time.time(), self._before(run)
        listed = before is not None and self.named(before[0].name) is not None
        beside = Beside(
            record=before and before[1],
            link=f"../{quote(before[0].path.name)}/" if before is not None and listed else None,
        )
        made = rendered(Source.find(run.runs, str(run.path), Sizes()), all_findings, beside)
        return _Pages(
            record=made.found.record, sections=made.sections, timeline=made.timeline, over=made.over, unix=unix
        )

    def _before(self, run: RunDir) -> tuple[RunDir, Record] | None:
        """The latest earlier run of the same name that has logged something."""
        paths = run_folders.by_time(run_folders.entries(run.path.parent))
        names = [path.name for path in paths]
        earlier = paths[: names.index(run.path.name)] if run.path.name in names else []
        for path in reversed([path for path in earlier if RunDir.is_one(path)][-MOST_BEFORE:]):
            with contextlib.suppress(TdppError, OSError):
                record, _ = self._records.of(RunDir(path.absolute()))
                if len(record.metrics):
                    return RunDir(path.absolute()), record
        return None

    def _listed(self) -> tuple[list[Listed], float]:
        """The runs, and for how many seconds they are not looked at again."""
        with self._lock:
            if self._list is None or time.monotonic() > self._list[0]:
                began = time.monotonic()
                found = listed(self._runs, self._filter)
                on_slurm = any(run.seen is not None and run.seen.jobs for run in found)
                ended = time.monotonic()
                waits = max(SLURM_S if on_slurm else FRESH_S, SHARE * (ended - began))
                self._list = ended + waits, waits, found
            return self._list[2], self._list[1]


def link(run: RunDir) -> str:
    """Returns the link to a run's page from that of the list."""
    return f"runs/{quote(run.name)}/"


def _following(page: str, over: bool, seconds: float) -> str:
    """The page, which loads itself anew unless nothing more will come."""
    from reports.figures.page import refreshing

    return page if over else refreshing(page, round(seconds))


def _record(run: RunDir) -> Record:
    from reports.readers import record

    return record.read(run)


def _outcome(run: RunDir) -> tuple[Outcome, bool]:
    from reports.facts.side_by_side import busy
    from reports.facts.statistics import statistics
    from reports.pages.comparison import outcome
    from reports.readers.megatron_log import Sizes
    from reports.sources import Source

    found = Source.find(run.runs, str(run.path), Sizes()).read()
    plan, verdict, over = found.record.plan, None, True
    try:
        findings = all_findings(run)
    except TdppError:  # its own page says why
        pass
    else:
        verdict, over = findings.verdict, findings.over
    at_work = busy(statistics(found.timeline, plan.ranks, found.record), plan)
    return outcome(found.record, verdict, link(run), found.prediction, at_work), over


def _line(run: Listed) -> RunLine:
    from reports.pages.runs_page import RunLine

    state = run.state
    tone = "good" if state is State.succeeded else "bad" if EXIT_CODES[state] else "open"
    if run.seen is None:
        page = link(run.run) if RunDir.is_one(run.run.path) else None
        return RunLine(name=run.run.name, link=page, state=str(state), tone=tone, note=run.note)
    _, _, iteration, loss, _ = run_row(run.run.name, run.seen)
    time = time_of(run.seen) if run.seen.log else None
    kind, age, took, _, plan, _ = more_cells(run.seen)
    last = run.seen.log[-1].iteration if run.seen.log else 0
    return RunLine(
        name=run.run.name,
        link=link(run.run),
        state=str(state),
        tone=tone,
        iteration=iteration,
        progress=last / max(1, run.seen.iterations),
        loss=loss,
        ms="-" if time is None else time.cell,
        outlook=outlook(run.seen, state).text,
        kind=kind,
        age=age,
        took=took,
        plan=plan,
        note=run.note,
    )


T = TypeVar("T")
FRESH_S = 5.0
"""What is made of a run is not made again for so long; longer where making it takes more than a tenth of it."""
LOOK_S = 30.0
"""A run whose files stay as they are is looked at again after so long: it may stand still, or its job be gone."""
SHARE = 9


@dataclass
class _Entry(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: T | None = None
    files: frozenset[tuple[str, int, int]] = frozenset()
    made: float = 0.0
    took_s: float = 0.0
    """The seconds of a processor, so that what else runs on the machine makes nothing older."""


class Kept(Generic[T]):
    """What `make` gives for runs, the latest `most` of them. Threads may ask at the same time."""

    def __init__(self, make: Callable[[RunDir], T], is_over: Callable[[T], bool], most: int) -> None:
        self._make = make
        self._is_over = is_over
        self._most = most
        self._lock = threading.Lock()
        self._entries = OrderedDict[RunDir, _Entry[T]]()

    def of(self, run: RunDir) -> tuple[T, float]:
        """It, and how many seconds it may be shown before it is asked for again. Raises what `make` raises."""
        with self._lock:
            entry = self._entries.setdefault(run, _Entry())
            self._entries.move_to_end(run)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        with entry.lock:  # a second one who asks waits for what the first one has made
            if entry.value is None or self._is_stale(entry, entry.value, run):
                began, entry.files = time.thread_time(), _files(run)
                entry.value = self._make(run)
                entry.made = time.monotonic()
                entry.took_s = time.thread_time() - began
            return entry.value, max(FRESH_S, SHARE * entry.took_s)

    def _is_stale(self, entry: _Entry[T], value: T, run: RunDir) -> bool:
        age = time.monotonic() - entry.made
        if age < max(FRESH_S, SHARE * entry.took_s):
            return False
        return _files(run) != entry.files or (age > LOOK_S and not self._is_over(value))


def _files(run: RunDir) -> frozenset[tuple[str, int, int]]:
    """Names, times and sizes of the files that a page is made from."""
    found = set()
    for folder in (run.path, run.nodes, run.events, run.errors):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False):
                        found.add((entry.path, status.st_mtime_ns, status.st_size))
        except OSError:  # not there yet, or not any more
            continue
    return frozenset(found)
