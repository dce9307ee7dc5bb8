"""What making pairs and making images have in common: data that are there are left alone, others made whole."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.reading.values import option, whole
from conf.schema.data import check_split
from data_prep.errors import DataPrepError
from data_prep.files.journal import Journal, work_folder
from data_prep.files.progress import unchanged
from data_prep.kinds import kind_of, read_described, recipe_of
from megatron_ext.data.indexed_dataset import data_file

BYTES_A_WORKER = 1 << 24
"""With less than that a process takes longer to begin than to do its part."""


def add_common_options(make: argparse.ArgumentParser, what: str, *, workers: bool = True) -> None:
    """Gives `make` the options that all data have that are split when they are made; `what` is drawn by the seed."""
    make.add_argument(
        "--seed", type=option(whole), default=1234, metavar="N", help=f"other seeds hold out other {what}"
    )
    if workers:
        make.add_argument(
            "--workers", type=option(whole), metavar="N", help="processes (default: up to one for each CPU)"
        )
    make.add_argument("--force", action="store_true", help="make the data again if they exist")


def weights_of(split: str) -> list[float]:
    """Of training, validation and test; raises DataPrepError for a text that is none."""
    try:
        check_split(split)
    except ConfigError as error:
        raise DataPrepError(str(error).replace("data.split=", "--split ", 1)) from error
    return [float(weight) for weight in split.split(",")]


@dataclass(frozen=True, kw_only=True)
class _Hashes:
    sha256: dict[str, str]


def is_prepared(prefix: Path, kind: str, recipe: dict[str, Any]) -> bool:
    """Whether the files are there, unchanged, and of this recipe."""
    if kind_of(prefix) != kind or recipe_of(prefix) != recipe:
        return False
    try:
        return unchanged(read_described(prefix, _Hashes).sha256, prefix)
    except DataPrepError:  # nobody can tell what the data are: they are made anew
        return False


def make_unless_there(prefix: Path, kind: str, recipe: dict[str, Any], force: bool, make: Callable[[], str]) -> None:
    """Makes data, or says that they are there; prints their prefix.

    Args:
        prefix: where they go.
        kind: of the data.
        recipe: all that they follow from.
        force: makes them also if they are there, or something else is.
        make: makes them, and says what they are.

    Raises:
        DataPrepError: data of another kind have this name; or as `make`.
    """
    if not force and is_prepared(prefix, kind, recipe):
        print(f"{prefix}: exists already, unchanged; --force makes it again", file=sys.stderr)
    else:
        described = data_file(prefix, ".json")
        if described.exists() and kind_of(prefix) != kind and not force:
            raise DataPrepError(
                f"--output {prefix}: {described} is there, and is not of {kind}; choose another --output, or replace "
                "it with --force"
            )
        print(make(), file=sys.stderr)
    print(prefix)


@contextmanager
def making(prefix: Path, recipe: dict[str, Any]) -> Iterator[Journal]:
    """The journal of data in the making, whose steps go on where an earlier call was interrupted.

    Raises:
        DataPrepError: as `work_folder`.
    """
    try:
        with work_folder(prefix, recipe) as folder:
            yield Journal(folder)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from there", file=sys.stderr)
        raise
