"""What making pairs, images and videos has in common: data that are there are left alone, others made whole."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conf.reading.parser import option
from conf.reading.values import prefix_path, whole
from data_prep.errors import DataPrepError
from data_prep.files.journal import Journal, work_folder
from data_prep.files.progress import unchanged
from data_prep.indexed.manifest import read_manifest
from data_prep.kinds import VERSION, kind_of, read_described
from data_prep.text.corpus import Corpus
from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.models.model import TEXT
from megatron_ext.data.indexed_dataset import data_file

BYTES_A_WORKER = 1 << 24
"""With less than that a process takes longer to begin than to do its part."""


def add_source(make: argparse.ArgumentParser, what: str, kind: type[str] | type[Path] = str) -> None:
    """Gives `make` the option for what the data are made from, one or several; `what` says what that may be."""
    make.add_argument("--source", nargs="+", type=kind, required=True, metavar="PATH", help=what)


def add_output(make: argparse.ArgumentParser, first: str) -> None:
    """Gives `make` the option for the data's prefix; `first` is the name of the first file."""
    files = f"the files are {first} and so on, and <output>.json"
    make.add_argument("--output", type=option(prefix_path), required=True, help=files)


def add_number(make: argparse._ActionsContainer, name: str, what: str, default: int | None = None) -> None:
    """Gives `make` an option that takes a whole number of at least 1."""
    make.add_argument(name, type=option(whole), default=default, metavar="N", help=what)


def add_split(make: argparse.ArgumentParser, default: str, of_what: str) -> None:
    """Gives `make` the option for the weights of training, validation and test."""
    message = f"weights of training, validation and test, {of_what} (default: %(default)s)"
    make.add_argument("--split", default=default, metavar="W,W,W", help=message)


def add_common_options(make: argparse.ArgumentParser, what: str | None = None, *, workers: bool = True) -> None:
    """Gives `make` the options that all data have; of those that are split when they are made the seed draws `what`."""
    if what is not None:
        add_number(make, "--seed", f"other seeds hold out other {what}", 1234)
    if workers:
        add_number(make, "--workers", "processes (default: up to one for each CPU)")
    make.add_argument("--force", action="store_true", help="make the data again if they exist")


@dataclass(frozen=True, kw_only=True)
class Request(ABC):
    """Data that are to be prepared, and how."""

    corpus: Corpus
    """All files that the data follow from."""
    workers: int = 1

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """All that the data follow from. Reads the whole corpus, with progress on stderr. Raises DataPrepError: a file
        cannot be read."""


@dataclass(frozen=True, kw_only=True)
class SplitRequest(Request):
    """Data that are split into training, validation and test when they are made."""

    weights: Sequence[float]
    """Their relative sizes."""
    seed: int


def workers_of(arguments: argparse.Namespace, corpus: Corpus) -> int:
    """How many processes are asked for, or worth it."""
    return arguments.workers or min(usable_cores(), 1 + corpus.bytes // BYTES_A_WORKER)


R = TypeVar("R", bound=Request)
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class _Identity:
    version: int = VERSION
    recipe: dict[str, Any]
    sha256: dict[str, str]


def is_prepared(prefix: Path, kind: str, recipe: dict[str, Any]) -> bool:
    """Whether the files are there, unchanged, and of this recipe."""
    try:
        found = read_manifest(prefix) if kind == TEXT else read_described(prefix, _Identity)
    except DataPrepError:  # nobody can tell what the data are: they are made anew
        return False
    if found is None or kind_of(prefix) != kind or found.recipe != recipe:
        return False
    return unchanged(found.sha256, prefix)


def make_unless_there(
    prefix: Path,
    force: bool,
    kind: str,
    request: R,
    prepare: Callable[[R, Path, dict[str, Any]], M],
    summary: Callable[[M], str],
) -> None:
    """Prepares data, or says that they are there; prints their prefix.

    Args:
        prefix: what `--output` stands for.
        force: makes them again, and replaces data of another kind.
        prepare: makes them from the request, under a prefix, by a recipe.
        summary: says in a line what was made.

    Raises:
        DataPrepError: data of another kind have this name; or as `prepare`.
    """
    recipe = request.recipe()
    if not force and is_prepared(prefix, kind, recipe):
        print(f"{prefix}: exists already, unchanged; --force makes it again", file=sys.stderr)
    else:
        described, there = data_file(prefix, ".json"), kind_of(prefix)
        ours = there == kind or (kind == TEXT and there is None)  # whose prefix has an ending of its own
        if described.exists() and not ours and not force:
            raise DataPrepError(
                f"--output {prefix}: {described} is there, and is not of {kind}; choose another --output, or replace "
                "it with --force"
            )
        print(summary(prepare(request, prefix, recipe)), file=sys.stderr)
    print(prefix)


@contextmanager
def making(prefix: Path, recipe: dict[str, Any]) -> Iterator[Journal]:
    """The journal of data in the making, whose steps go on where an earlier call was interrupted. Raises DataPrepError:
    as `work_folder`."""
    try:
        with work_folder(prefix, recipe) as folder:
            yield Journal(folder)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from there", file=sys.stderr)
        raise
