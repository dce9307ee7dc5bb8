"""The arguments that the commands about runs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from conf.rundir import RunDir


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run folder, its name (tiny, or 20260131-120000-0123abcd), or a job id; default: the latest run",
    )
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs are (default: %(default)s)")


def chosen_run(arguments: argparse.Namespace) -> RunDir:
    """Raises RunFolderError if there is no such run."""
    return RunDir.find(arguments.runs_dir, arguments.run)
