"""`tdpp launch resume=…`: a run goes on, or what of a sweep is missing or failed is started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.errors import RunFolderError
from conf.reading.values import parse_key_values, path
from conf.run_folder.json_values import typed
from conf.run_folder.run_files import parse_json
from conf.run_folder.run_folders import RUNS_DIR, usual_runs_dir
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.own_path import read_own_file

RESUME = "resume="
SWEEPS, WORDS = "sweeps", "words.json"
"""In a folder of runs; and in that of a sweep, what was typed."""
SWEEPER = "hydra/sweeper="
SKIPS = "skip_existing="


@dataclass(frozen=True, kw_only=True)
class SweepWords:
    """What was typed to start a sweep, and where."""

    words: tuple[str, ...]
    cwd: str
    packed: tuple[tuple[str, ...], ...] = ()
    """With pack=true the words of each combination, with the plan that it got."""


def resumed(argv: Sequence[str], of_run: Callable[[RunDir], int], of_sweep: Callable[[SweepWords], int]) -> int:
    """Has the run or the sweep that is meant go on; `of_sweep` gets what was typed for the sweep.

    Raises:
        TdppError: there is none, or other words are given.
    """
    wanted, runs_dir = named_run(
        argv,
        RESUME,
        empty="give a run's folder, its name, its job id, 'latest', or a sweep's folder",
        others="continues a run as it was configured and takes no other word but runs_dir=…; to change the "
        "configuration, start a new run with train.load=FOLDER of that run",
    )
    if (sweep := _sweep(runs_dir, wanted)) is None:
        return of_run(RunDir.find(runs_dir, wanted))
    sweep = sweep.absolute()
    typed_words = _words(sweep)
    with _usual_runs_dir(sweep.parent.parent), contextlib.chdir(typed_words.cwd):
        return of_sweep(typed_words)


def skipping(words: Sequence[str]) -> tuple[str, ...]:
    """The words by which what is there already is left alone, unless they say whether it is."""
    return tuple(words) if any(word.startswith(SKIPS) for word in words) else (*words, f"{SKIPS}true")


def named_run(argv: Sequence[str], word: str, *, empty: str, others: str) -> tuple[str, Path]:
    """What a word such as `resume=` names, and the folder of runs in which it is.

    Args:
        empty: the way out where it names nothing.
        others: what to say of other words beside it and runs_dir=.

    Raises:
        LaunchError: in either case.
    """
    key = word.rstrip("=")
    wanted, _ = parse_key_values(argv, {key: str, "runs_dir": path}, LaunchError)
    if not wanted[key]:
        raise LaunchError(f"{word} is empty; {empty}")
    if len(wanted) != len(argv):
        raise LaunchError(f"{' '.join(argv)}: {word}RUN {others}")
    return wanted[key], wanted.get("runs_dir", usual_runs_dir())


def _sweep(runs_dir: Path, wanted: str) -> Path | None:
    """The folder of a sweep: by its path or by its name, below `sweeps`."""
    places = [Path(wanted), runs_dir / SWEEPS / wanted, runs_dir / wanted]
    return next((place for place in places if place.absolute().parent.name == SWEEPS and place.is_dir()), None)


@contextlib.contextmanager
def _usual_runs_dir(runs: Path) -> Iterator[None]:
    """Where nothing that was typed says where runs are, they are where the sweep is, whatever the shell says now."""
    before = os.environ.get(RUNS_DIR)
    os.environ[RUNS_DIR] = str(runs)
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUNS_DIR]
        else:
            os.environ[RUNS_DIR] = before


def _words(sweep: Path) -> SweepWords:
    """Raises LaunchError where they are not there, not this user's own, or cannot be typed again."""
    file = sweep / WORDS
    if not file.exists():
        raise LaunchError(
            f"resume={sweep}: {WORDS} is not there, for the sweep is of an earlier version of tdpp; type its command "
            "again with skip_existing=true"
        )
    try:
        found = typed(SweepWords, parse_json(read_own_file(file).decode(errors="replace"), str(file)), str(file))
    except RunFolderError as error:
        raise LaunchError(f"resume={sweep}: {error}; type the sweep's command again with skip_existing=true") from error
    if any(word.startswith(SWEEPER) for word in found.words):
        raise LaunchError(
            f"resume={sweep}: its sweeper chooses each combination by the results before, and would choose anew; "
            "type the sweep's command again, with the storage of the sweeper where it has one"
        )
    if not Path(found.cwd).is_dir():
        raise LaunchError(f"resume={sweep}: {found.cwd}, where it was started, is not there any more")
    return found
