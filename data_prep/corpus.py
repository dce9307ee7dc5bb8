"""Sources of text: each gives documents in an order that does not depend on the machine."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

from data_prep.errors import DataPrepError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"})
"""Folders of a Python installation that are not its library, or hold files in odd encodings on purpose."""


@dataclass(frozen=True)
class StdlibCorpus:
    """The sources of this Python's standard library, a file a document: real text that every machine has."""

    folder: Path
    max_mb: int | None = None
    """Take the first files that together stay below so many megabytes (10^6 bytes); None takes all."""

    @classmethod
    def of_this_python(cls, max_mb: int | None = None) -> StdlibCorpus:
        return cls(Path(sysconfig.get_path("stdlib")), max_mb)

    @property
    def description(self) -> str:
        """What the manifest says of the source; data of the same description are the same."""
        whole = f"Python {platform.python_version()} standard library"
        return whole if self.max_mb is None else f"{whole}, first {self.max_mb} MB"

    def files(self) -> list[Path]:
        """The source files, in the order of the documents.

        Raises:
            DataPrepError: there is none, or a folder cannot be read.
        """
        files: list[Path] = []
        for folder, folders, names in os.walk(self.folder, onerror=_unreadable):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        files.sort()
        if not files:
            raise DataPrepError(
                f"{self.folder}: no Python sources there; this Python came without its standard library"
            )
        if self.max_mb is None:
            return files
        ends = accumulate(file.stat().st_size for file in files)
        return [file for file, end in zip(files, ends, strict=True) if end <= self.max_mb * 10**6]


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The text of each file that is not empty.

    Raises:
        DataPrepError: a file cannot be read, or is not UTF-8.
    """
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise DataPrepError(f"{path}:{line}: not UTF-8 (byte {error.object[error.start]:#04x})") from error
        except OSError as error:
            _unreadable(error)
        if text:
            yield text


def _unreadable(error: OSError) -> NoReturn:
    raise DataPrepError(f"{error.filename}: cannot be read ({error.strerror})") from error
