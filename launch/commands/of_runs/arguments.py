"""The arguments that the commands about runs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from conf.errors import RunFolderError
from conf.reading.values import above_0, option
from conf.run_folder.run_folders import usual_runs_dir
from conf.run_folder.rundir import RunDir

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
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise RunFolderError(
            f"--runs-dir {folder.absolute()}: {error.strerror}; give a folder that has runs, or start a run with "
            f"'tdpp launch'"
        ) from error
    return folder


def _seconds(text: str) -> float:
    """0 leaves the choice to the command."""
    return 0.0 if text == _DEFAULT else above_0(text)
