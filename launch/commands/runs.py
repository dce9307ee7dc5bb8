"""`tdpp runs`: every run, a line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import ClosedError, RunFolderError
from conf.reading.parser import Parser
from conf.run_folder import run_folders
from conf.run_folder.rundir import RunDir
from conf.visible import plural, visible
from launch.commands.run_arguments import Filter, add_filter, add_runs_dir, add_watch, filter_of, parsed, runs_folder
from launch.errors import LaunchError
from launch.files.run_files import RunFiles, read_run_files
from launch.judge.findings import Findings
from launch.judge.state import EXIT_CODES, State
from launch.judge.status_text import COLUMNS, MORE_COLUMNS, as_json, judged_as_json, more_cells, run_row
from launch.judge.verdict import Verdict, decide, is_young, verdict_without_plan
from launch.observe.executors import SUBMISSION_S, Answers
from launch.observe.look import answers_to, finish_observation
from launch.observe.observation import Observation
from launch.screen import View, plain, watch

NOTE = "note"
"""A further column, where a run has no plan, or could not be judged."""
EVERY = Filter()
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run, as far as it could be seen."""

    run: RunDir
    seen: Observation | None = None
    """None of a run that has no plan, or cannot be judged."""
    verdict: Verdict | None = None
    note: str = ""
    """Why it was not seen, or what of its files is damaged."""
    closed: bool = False
    """Whether it was not seen because this user may not read it."""
    may_change: bool = False
    """Whether it may be seen at the next look."""

    @property
    def state(self) -> State:
        return State.unknown if self.verdict is None else self.verdict.state

    @property
    def over(self) -> bool:
        return not self.may_change if self.seen is None else self.seen.over


def main(argv: Sequence[str]) -> int:
    arguments = parsed(parser(), argv)
    folder, wanted = runs_folder(arguments), filter_of(arguments)
    closed = len(run_folders.closed_in(folder))
    reported = False

    def look() -> View:
        nonlocal reported
        found = listed(folder, wanted)
        open_ones = [run for run in found if not run.closed]
        if wanted.words and not open_ones and found:
            raise RunFolderError(found[-1].note)
        if not reported and (count := closed + len(found) - len(open_ones)):
            there = f"{plural(count, 'folder')} in {folder} cannot be read"
            print(f"{there} and {'are' if count > 1 else 'is'} not listed", file=sys.stderr, flush=True)
        reported = True
        return _view(open_ones, arguments.json)

    if arguments.watch is None:
        view = look()
        view.show()
        code = view.exit_code
    else:
        code = watch(look, arguments.watch)
    if code:
        raise LaunchError(f"{folder}: some runs could not be judged; their notes say why")
    return code


def parser() -> Parser:
    made = Parser(prog="tdpp runs", description="List the runs, oldest first, with their verdicts.")
    add_filter(made)
    add_runs_dir(made)
    made.add_argument(
        "--json", action="store_true", help="print a JSON list with one object per run, as in 'tdpp status'"
    )
    add_watch(made, "until all are over")
    return made


def listed(runs: Path, wanted: Filter = EVERY) -> list[Listed]:
    """The runs that are wanted, oldest first, without those that are deleted meanwhile.

    Slurm is asked once, about the jobs of all that are not over.

    Raises:
        RunFolderError: no run is meant by a word of the filter.
    """
    chosen = wanted.chosen(runs, RunDir.everything(runs))
    first = [
        (run, _attempt(run, partial(read_run_files, run))) if RunDir.is_one(run.path) else (run, None) for run in chosen
    ]
    answers = answers_to(look for _, look in first if isinstance(look, RunFiles))
    found = []
    for run, look in first:
        one = _completed(run, look, answers) if isinstance(look, RunFiles) else look or _begun(run)
        if one is not None and wanted.passes(one.seen, one.state):
            found.append(one)
    return found[-(wanted.limit or len(found)) :]


def _completed(run: RunDir, look: RunFiles, answers: Answers) -> Listed | None:
    def judged() -> Listed:
        seen = finish_observation(look, answers)
        verdict = decide(seen)
        if verdict.state is State.unknown:
            closed = any(fault.closed and fault.decisive for fault in seen.faults)
            return Listed(run=run, note=verdict.reason, closed=closed, may_change=True)
        return Listed(run=run, seen=seen, verdict=verdict, note="; ".join(fault.text for fault in seen.faults))

    return _attempt(run, judged)


def _attempt(run: RunDir, look: Callable[[], T]) -> T | Listed | None:
    """What `look` returns, or why it could not; None if the run was deleted meanwhile."""
    try:
        return look()
    except (OSError, RunFolderError) as error:
        closed = isinstance(error, ClosedError | PermissionError)
        return Listed(run=run, note=str(error), closed=closed) if RunDir.is_one(run.path) else None


def _begun(run: RunDir) -> Listed | None:
    """A folder without a plan; None for one that somebody is just deleting."""
    try:
        verdict = verdict_without_plan(run)
    except (OSError, RunFolderError) as error:
        if not run.path.is_dir() or is_young(run, SUBMISSION_S):
            return None
        return Listed(run=run, note=str(error), closed=isinstance(error, ClosedError | PermissionError))
    if verdict is None:
        return None
    return Listed(run=run, verdict=verdict, note=verdict.reason, may_change=verdict.state is State.starting)


def _view(runs: Sequence[Listed], as_objects: bool) -> View:
    unknown = any(run.verdict is None for run in runs)
    columns, rows = (*COLUMNS, *MORE_COLUMNS, *[NOTE] * any(run.note for run in runs)), [_row(run) for run in runs]
    reasons = [reason for run in runs if (reason := _reason(run)) is not None]
    text = json.dumps([_object(run) for run in runs]) if as_objects else "\n".join([plain(columns, rows), *reasons])
    screen = None
    if sys.stdout.isatty() and not as_objects:
        from rich.console import Group
        from rich.text import Text

        from launch.commands.status_display import runs_screen

        screen = Group(runs_screen(columns, rows), *(Text(visible(reason)) for reason in reasons))
    return View(
        plain=text,
        key=[row[: len(COLUMNS)] for row in rows],  # ages change, and nothing else has
        over=all(run.over for run in runs),
        exit_code=LaunchError.exit_code * unknown,
        on_slurm=any(run.may_change or (run.seen and run.seen.jobs) for run in runs),
        screen=screen,
    )


def _reason(run: Listed) -> str | None:
    """Says why a run is in trouble, which a table has no room for."""
    if run.seen is None or run.verdict is None or EXIT_CODES[run.state] in (0, EXIT_CODES[State.stopped]):
        return None
    return f"{run.run.name}: {run.verdict}"


def _row(run: Listed) -> list[str]:
    if run.seen is None:
        return [run.run.name, str(run.state), *["-"] * (len(COLUMNS) + len(MORE_COLUMNS) - 2), run.note]
    return [*run_row(run.run.name, run.seen), *more_cells(run.seen), *[run.note] * bool(run.note)]


def _object(run: Listed) -> dict[str, Any]:
    if run.verdict is None:
        return {"run": run.run.name, "path": str(run.run.path), "state": None, "reason": run.note}
    if run.seen is None:
        return judged_as_json(run.run, run.verdict)
    return as_json(Findings(run=run.run, seen=run.seen, verdict=run.verdict))
