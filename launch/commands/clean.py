"""`tdpp clean`: lists what runs have left behind, and removes it once that was agreed to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from conf.reading.values import Parser, not_negative, option
from conf.schema.experiment import Cluster
from conf.visible import span, visible
from launch.commands.of_runs.arguments import add_runs_dir
from launch.commands.of_runs.leftovers import (
    Leftover,
    containers,
    dead_links,
    images,
    locks,
    short_jobs,
    unfinished_runs,
)
from launch.errors import LaunchError
from launch.screen.consent import agreed, can_be_asked
from launch.screen.table import print_table
from launch.screen.text import size_text

DAY_S = 86400.0
DAYS = 30.0
"""Containers and images take long to make: those that were used in so many days are kept, if nothing else is asked."""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp clean <argv>`.

    Raises:
        LaunchError: something could not be removed; what could be, is.
    """
    arguments = parser().parse_args(argv)
    found = list(_found(arguments))
    if not found:
        print("nothing to remove")
        return 0
    print_table(("what", "unused for", "size", "where"), [_row(one) for one in found])
    total = size_text(sum(one.size or 0 for one in found))
    question = f"remove {'it' if len(found) == 1 else f'all {len(found)}'}, {total}?"
    if not arguments.yes and not (can_be_asked() and agreed(question)):
        print("nothing removed" + ("" if can_be_asked() else "; add --yes to remove all of it"), file=sys.stderr)
        return 0
    _remove(found)
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="tdpp clean",
        description="List what your runs have left behind, and ask before removing it: interrupted launches, jobs of "
        "tdpp doctor and tdpp profile, dangling links named after jobs, container images that tdpp "
        "fetched, and enroot containers and their locks on this machine. Started runs and other users' "
        "files are never touched.",
    )
    add_runs_dir(made)
    made.add_argument(
        "--image-dir",
        type=Path,
        help="container.image_dir of the runs (default: the folder images beside the folder of runs)",
    )
    made.add_argument(
        "--scratch",
        type=Path,
        default=Path(Cluster.__dataclass_fields__["scratch"].default),
        help="cluster.scratch of the runs (default: %(default)s)",
    )
    made.add_argument(
        "--older-than",
        metavar="DAYS",
        type=option(not_negative),
        help=f"only what was not used for this many days (default: {DAYS:g} for containers and images, else 0)",
    )
    made.add_argument("--yes", action="store_true", help="remove everything listed without asking")
    return made


def _found(arguments: argparse.Namespace) -> Iterator[Leftover]:
    runs, scratch, days = arguments.runs_dir, arguments.scratch, arguments.older_than
    image_dir = arguments.image_dir or runs.absolute().parent / "images"
    quick = (unfinished_runs(runs), short_jobs(runs), dead_links(runs), locks(scratch))
    slow = (images(image_dir, runs), containers(scratch))
    for sources, default in ((quick, 0.0), (slow, DAYS)):
        least_s = DAY_S * (default if days is None else days)
        yield from (one for source in sources for one in source if one.unused_s >= least_s)


def _row(one: Leftover) -> list[str]:
    return [one.what, span(one.unused_s), "" if one.size is None else size_text(one.size), visible(one.where)]


def _remove(found: Sequence[Leftover]) -> None:
    removed, failed = 0, []
    for one in found:
        try:
            one.remove()
            removed += 1
        except (LaunchError, OSError) as error:
            failed.append(f"{one.where}: {error.strerror if isinstance(error, OSError) else error}")
    print(f"removed {removed} of {len(found)}")
    if failed:
        raise LaunchError("could not be removed: " + "; ".join(failed))
