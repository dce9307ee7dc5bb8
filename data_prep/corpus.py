"""Sources of text: each gives documents in an order that does not depend on the machine."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import DataPrepError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"})
"""Folders of a Python installation that are not its library, or hold files in odd encodings on purpose."""


@dataclass(frozen=True)
class StdlibCorpus:
    """The sources of this Python's standard library, a file a document: real text that every machine has."""

    folder: Path

    @classmethod
    def of_this_python(cls) -> StdlibCorpus:
        return cls(Path(sysconfig.get_path("stdlib")))

    @property
    def description(self) -> str:
        """What the manifest says of the source; data of the same description are the same."""
        return f"Python {platform.python_version()} standard library"

    def files(self) -> list[Path]:
        """Every source file, in the order of the documents.

        Raises:
            DataPrepError: there is none.
        """
        found = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*.py"))
        found = [path for path in found if not LEFT_OUT.intersection(path.parts)]
        if not found:
            raise DataPrepError(
                f"{self.folder}: no Python sources there; this Python came without its standard library"
            )
        return [self.folder / path for path in found]


def read_documents(files: list[Path]) -> Iterator[str]:
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
            raise DataPrepError(f"{path}: cannot be read ({error.strerror})") from error
        if text:
            yield text
