"""The arguments that the commands about runs share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from conf.errors import RunFolderError, reworded
from conf.reading.parser import option
from conf.reading.values import NoValue, above_0, whole
from conf.run_folder.run_folders import usual_runs_dir
from conf.run_folder.rundir import RunDir
from launch.judge.state import State
from launch.observe.observation import Observation, RunKind

_WATCH = "--watch"
_DEFAULT = "auto"


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run folder or a path in it, a name (tiny, or 20260131-120000-0123abcd), a folder of runs (its latest "
        "run is taken), a job id, or 'latest' (default: the latest run)",
    )
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, default=usual_runs_dir(), help="the folder of runs (default: TDPP_RUNS_DIR, or runs)"
    )


def add_watch(parser: argparse.ArgumentParser, until: str) -> None:
    """`--watch` or `--watch=SECONDS`: for `parsed`. A word after it is a RUN."""
    parser.add_argument(
        _WATCH,
        metavar="SECONDS",
        type=option(_seconds),
        help=f"repeat every SECONDS, {until} (--watch alone: 2 s, or 10 s if Slurm has to be asked); on a terminal "
        f"the output is redrawn, elsewhere only changes are printed",
    )


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """`argv`, in which a bare `--watch` takes no value: argparse would take the RUN after it for one."""
    words = [f"{_WATCH}={_DEFAULT}" if word == _WATCH else word for word in argv]
    return parser.parse_args(words)


def chosen_run(arguments: argparse.Namespace) -> RunDir:
    """Raises RunFolderError if there is no such run."""
    return RunDir.find(arguments.runs_dir, arguments.run)


def runs_folder(arguments: argparse.Namespace) -> Path:
    """Raises RunFolderError if there is no such folder, or it cannot be listed."""
    folder: Path = arguments.runs_dir
    with reworded(
        RunFolderError,
        f"--runs-dir {folder.absolute()}: ",
        "; give a folder that has runs, or start a run with 'tdpp launch'",
    ):
        next(folder.iterdir(), None)
    return folder


def _seconds(text: str) -> float:
    """0 leaves the choice to the command."""
    return 0.0 if text == _DEFAULT else above_0(text)


Word = TypeVar("Word", bound=StrEnum)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which runs are listed; by default all."""

    words: tuple[str, ...] = ()
    """Names, patterns of names, folders of runs, or what else means one run."""
    verdicts: frozenset[State] = frozenset()
    kinds: frozenset[RunKind] = frozenset()
    limit: int | None = None
    """Only so many, the latest."""

    def chosen(self, runs_dir: Path, everything: Sequence[RunDir]) -> list[RunDir]:
        """Returns those of all runs that can pass, as far as they need not be looked into for that. Raises
        RunFolderError: there is no run of a word."""
        meant = {run for word in self.words for run in _meant(runs_dir, word, everything)}
        found = [run for run in everything if run in meant or not self.words]
        return found if self.verdicts or self.kinds else found[-(self.limit or len(found)) :]

    def passes(self, seen: Observation | None, state: State) -> bool:
        """Whether a run does that is in such a state; without a plan it is of no kind."""
        kind = None if seen is None else seen.kind
        return (not self.verdicts or state in self.verdicts) and (not self.kinds or kind in self.kinds)


def add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="only these runs: names (with * and ? as wildcards), run folders, folders of runs, or job ids",
    )
    parser.add_argument(
        "--verdict",
        type=option(_several(State)),
        default=frozenset(),
        metavar="A,B",
        help=f"only runs with one of these verdicts: {_all(State)}",
    )
    parser.add_argument(
        "--kind",
        type=option(_several(RunKind)),
        default=frozenset(),
        metavar="A,B",
        help=f"only runs of one of these kinds: {_all(RunKind)}",
    )
    parser.add_argument("--limit", type=option(whole), metavar="N", help="only the latest N of them")


def filter_of(arguments: argparse.Namespace) -> Filter:
    return Filter(words=tuple(arguments.runs), verdicts=arguments.verdict, kinds=arguments.kind, limit=arguments.limit)


def _meant(runs_dir: Path, word: str, everything: Sequence[RunDir]) -> list[RunDir]:
    below = os.path.realpath(word)
    found = [
        run
        for run in everything
        if any(fnmatchcase(name, word) for name in (run.path.parent.name, run.path.name, run.name))
        or Path(os.path.realpath(run.path)).is_relative_to(below)
    ]
    return found or [RunDir.find(runs_dir, word)]


def _several(words: type[Word]) -> Callable[[str], frozenset[Word]]:
    """A reader of words with commas between them; `not_finite` and `not-finite` are as good as `not finite`."""

    def read(text: str) -> frozenset[Word]:
        given = [part.strip().replace("_", " ").replace("-", " ") for part in text.split(",")]
        try:
            return frozenset(words(part) for part in given)
        except ValueError:
            raise NoValue(f"must be one or more of {_all(words)}, separated by commas") from None

    return read


def _all(words: type[StrEnum]) -> str:
    return ", ".join(words)
