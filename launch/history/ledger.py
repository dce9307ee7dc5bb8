"""The records of all runs in a folder of runs. A run that is over and has none gets one when somebody looks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from conf.errors import RunFolderError
from conf.run_folder import run_folders
from conf.run_folder.run_files import MOST_BYTES, opened, parse_json
from conf.run_folder.rundir import RunDir
from launch.files.run_files import RunFiles, read_run_files
from launch.history.record import RunRecord, parse, record_of, write
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.observe.executors import Answers
from launch.observe.look import answers_to, finish_observation
from launch.screen import remark

MANY = 20
"""So many runs without a record take long enough to say that they are read."""
_OPEN = (State.starting, State.running, State.failing, State.unknown)


def records(runs: Path, progress: Callable[[int], None] = lambda count: None) -> list[RunRecord]:
    """The records of all runs that are over and can be read, oldest first.

    `progress` gets the number of runs left that have no record yet.
    """
    found, without = [], []
    gc.disable()  # which would look through ten thousand records, again and again, for cycles that they do not have
    try:
        for folder in folders(runs):
            if (record := kept(folder.path)) is None:
                without.append(RunDir(Path(folder.path)))
            else:
                found.append(record)
        gc.freeze()
    finally:
        gc.enable()
    found += _made(without, progress)
    return sorted(found, key=lambda record: record.began_unix)


def announcement(runs: Path) -> Callable[[int], None]:
    """Returns what `records` takes as `progress`, which says once that many runs are to be read."""
    left = iter([MANY])

    def tell(count: int) -> None:
        if count >= MANY and next(left, None) is not None:
            remark(f"reading what {count} runs in {runs} say of their hosts; later it is known")

    return tell


def folders(runs: Path) -> Iterator[os.DirEntry[str]]:
    """Yields folders that may be runs. There may be ten thousand."""
    for name in _entries(str(runs)):
        if name.name != run_folders.BY_JOB:
            yield from _entries(name.path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [one for one in found if one.is_dir()]
    except OSError:
        return []


def kept(folder: str) -> RunRecord | None:
    """Returns the record in a run's folder; None where there is none, or the run was started again since."""
    path = Path(folder, "history.json")
    try:
        with opened(path, MOST_BYTES) as file:
            written = os.fstat(file.fileno())
            if os.stat(f"{folder}/jobs.json").st_mtime_ns > written.st_mtime_ns:  # noqa: PTH116  (faster)
                return None
            return parse(parse_json(file.read().decode(), str(path)), str(path))
    except (OSError, UnicodeDecodeError, RunFolderError):
        return None


def _made(runs: list[RunDir], progress: Callable[[int], None]) -> Iterator[RunRecord]:
    first: list[tuple[RunDir, RunFiles]] = []
    for run in runs:
        with suppress(OSError, RunFolderError):
            if RunDir.is_one(run.path):
                first.append((run, read_run_files(run)))
    answers = answers_to(before for _, before in first)
    for number, (run, before) in enumerate(first):
        progress(len(first) - number)
        with suppress(OSError, RunFolderError):
            if (record := _record(run, before, answers)) is not None:
                yield record


def _record(run: RunDir, before: RunFiles, answers: Answers) -> RunRecord | None:
    seen = finish_observation(before, answers)
    verdict = decide(seen)
    if not seen.over or verdict.state in _OPEN:
        return None
    record = record_of(run, seen, verdict)
    write(run, record)
    return record
