"""What can be wrong with text and indexed data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import ConfigError, TdppError
from megatron_ext.contract.errors import DataError


class DataPrepError(TdppError):
    """Text or indexed data that cannot be used."""


class BadDocument(Exception):
    """A raw document without text, the line (from 0) where that shows, and the number of its file in the corpus.

    The line counts in the document itself, or, once `file` is known, in that.
    """

    def __init__(self, line: int, why: str, file: int = 0) -> None:
        super().__init__(line, why, file)
        self.line = line
        self.why = why
        self.file = file

    def in_file(self, path: Path) -> DataPrepError:
        """The error for users, with the place in the file."""
        return DataPrepError(f"{path}:{self.line + 1}: {self.why}")


@contextmanager
def of_option(option: str, path: Path) -> Iterator[None]:
    """Errors about a file that an option names also name the option."""
    try:
        yield
    except DataPrepError as error:
        text = str(error)
        if text.startswith(option):
            raise
        raise DataPrepError(f"{option} {text}" if text.startswith(str(path)) else f"{option} {path}: {text}") from error


@contextmanager
def named(given: str = "") -> Iterator[None]:
    """Errors about data become errors of this room, which begin with the option or key that gave the data."""
    try:
        yield
    except (ConfigError, DataError, DataPrepError) as error:
        raise DataPrepError(f"{given}: {error}" if given else str(error)) from error


def missing_package(name: str, purpose: str) -> DataPrepError:
    return DataPrepError(f"the Python package {name} is needed {purpose}, but missing: pip install 'tdpp[data]'")
