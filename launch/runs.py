"""`tdpp runs`: every run, a line each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import RunFolderError
from conf.rundir import RunDir
from launch.arguments import add_runs_dir, add_watch, parsed, runs_folder
from launch.cut_off import is_young, verdict_without_plan
from launch.errors import LaunchError
from launch.findings import Findings
from launch.glance import Glance, glance
from launch.observe import SUBMISSION_S, Answers, Observation, answers_to, complete
from launch.pace import median_ms
from launch.status_text import as_json, judged_as_json
from launch.table import plain
from launch.verdict import State, Verdict, decide
from launch.watch import View, watch

COLUMNS = ("run", "verdict", "iteration", "loss", "ms/iteration")
NOTE = "note"
"""A further column, where a run has no plan, or could not be judged."""
UNKNOWN = str(State.unknown)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run, as far as it could be seen."""

    run: RunDir
    seen: Observation | None = None
    """None of a run that has no plan, or cannot be judged."""
    verdict: Verdict | None = None
    note: str = ""
    """Of a run that was not seen: why."""
    may_change: bool = False
    """Whether it may be seen at the next look."""

    @property
    def over(self) -> bool:
        return not self.may_change if self.seen is None else self.seen.over


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tdpp runs", description="List the runs, oldest first, with their verdicts.")
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list, an object for each run as in 'tdpp status'")
    add_watch(parser, "until all are over")
    arguments = parsed(parser, argv)
    folder = runs_folder(arguments)

    def look() -> View:
        return _view(listed(folder), arguments.json)

    if arguments.watch is None:
        view = look()
        view.show()
        code = view.exit_code
    else:
        code = watch(look, arguments.watch)
    if code:
        raise LaunchError(f"{folder}: some runs could not be judged; what is noted with them says why")
    return code


def listed(runs: Path) -> list[Listed]:
    """Every run, oldest first, without those that are deleted meanwhile.

    Slurm is asked once, about the jobs of all runs that are not over.
    """
    first = [(run, _attempt(run, partial(glance, run))) for run in RunDir.all(runs)]
    answers = answers_to(look for _, look in first if isinstance(look, Glance))
    found = [look if isinstance(look, Listed) else _completed(run, look, answers) for run, look in first if look]
    return sorted([*(run for run in found if run), *_begun(runs)], key=lambda run: run.run.path.name.split("-")[:2])


def _completed(run: RunDir, look: Glance, answers: Answers) -> Listed | None:
    def judged() -> Listed:
        seen = complete(look, answers)
        verdict = decide(seen)
        if verdict.state is State.unknown:
            return Listed(run=run, note=verdict.reason, may_change=True)
        return Listed(run=run, seen=seen, verdict=verdict)

    return _attempt(run, judged)


def _attempt(run: RunDir, look: Callable[[], T]) -> T | Listed | None:
    """What `look` returns, or why it could not; None if the run was deleted meanwhile."""
    try:
        return look()
    except (OSError, RunFolderError) as error:
        return Listed(run=run, note=str(error)) if RunDir.is_one(run.path) else None


def _begun(runs: Path) -> Iterator[Listed]:
    """Run folders without a plan, but for those that somebody is just deleting."""
    for run in RunDir.begun(runs):
        try:
            verdict = verdict_without_plan(run)
        except (OSError, RunFolderError) as error:
            if run.path.is_dir() and not is_young(run, SUBMISSION_S):
                yield Listed(run=run, note=str(error))
            continue
        if verdict is not None:
            going = verdict.state is State.starting
            yield Listed(run=run, verdict=verdict, note=verdict.reason, may_change=going)


def _view(runs: Sequence[Listed], as_objects: bool) -> View:
    unknown = any(run.verdict is None for run in runs)
    columns, rows = (*COLUMNS, *[NOTE] * any(run.note for run in runs)), [_row(run) for run in runs]
    text = json.dumps([_object(run) for run in runs]) if as_objects else plain(columns, rows)
    screen = None
    if sys.stdout.isatty() and not as_objects:
        from launch.screen import runs_screen

        screen = runs_screen(columns, rows)
    return View(
        plain=text,
        key=rows,
        over=all(run.over for run in runs),
        exit_code=LaunchError.exit_code * unknown,
        on_slurm=any(run.may_change or (run.seen and run.seen.jobs) for run in runs),
        screen=screen,
    )


def _row(run: Listed) -> list[str]:
    if run.seen is None:
        return [run.run.name, str(run.verdict.state) if run.verdict else UNKNOWN, "-", "-", "-", run.note]
    return run_row(run.run.name, run.seen)


def _object(run: Listed) -> dict[str, Any]:
    if run.verdict is None:
        return {"run": run.run.name, "path": str(run.run.path), "state": None, "reason": run.note}
    if run.seen is None:
        return judged_as_json(run.run, run.verdict)
    return as_json(Findings(run=run.run, seen=run.seen, verdict=run.verdict))


def run_row(name: str, seen: Observation) -> list[str]:
    """The cells of `COLUMNS` for a run."""
    last = seen.log[-1] if seen.log else None
    return [
        name,
        str(decide(seen).state),
        f"{last.iteration if last else 0}/{seen.iterations}",
        f"{last.loss:.4f}" if last and last.loss is not None else "-",
        f"{median_ms(seen):.1f}" if last else "-",
    ]
