"""Sources of text: which files, in an order that does not depend on the machine."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.archives import below, is_seen, unreadable
from data_prep.files.progress import shown

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"})
"""Folders of a Python installation that are not its library, or hold files in odd encodings on purpose."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files of text in the order of their documents."""

    description: str
    """What the manifest says of the source, for people."""
    files: tuple[Path, ...]
    names: tuple[str, ...]
    """Names of the files, without the folders above what was asked for."""

    @classmethod
    def of(cls, description: str, files: Mapping[Path, str]) -> Corpus:
        """Files with their names."""
        return cls(description=description, files=tuple(files), names=tuple(files.values()))

    @property
    def bytes(self) -> int:
        """Bytes of all files as they lie on the disk."""
        try:
            return sum(file.stat().st_size for file in self.files)
        except OSError as error:
            raise unreadable(Path(error.filename), error) from error

    def digest(self) -> str:
        """SHA-256 of all names and contents: the same for the same text wherever it lies. Shows progress on stderr.
        Raises DataPrepError: a file cannot be read."""
        whole = hashlib.sha256()
        with shown(f"hashing {self.description}", self.bytes, stays=False) as show:
            for name, path in zip(self.names, self.files, strict=True):
                try:
                    content = show.sha256(path)
                except OSError as error:
                    raise unreadable(path, error) from error
                whole.update(f"{name}\0{content}\n".encode(errors="surrogateescape"))
        return whole.hexdigest()


def corpus_of(paths: Sequence[Path]) -> Corpus:
    """Files, and all files in folders but hidden ones, folders sorted by name. Raises DataPrepError: one is not there
    or cannot be read, or there is no file."""
    files: list[tuple[Path, str]] = []
    for path in paths:
        if path.is_dir():
            files += [(file, str(file.relative_to(path))) for file in below(path, is_seen)]
        elif path.exists():
            files.append((path, path.name))
        else:
            raise DataPrepError(f"--source {path}: no such file or folder")
    described = ", ".join(str(path) for path in paths)
    if not files:
        raise DataPrepError(f"--source {described}: the folder has no files; give a file, or a folder of files")
    for file, _ in files:
        if not file.is_file():  # it is read twice, and a pipe or a device may never end
            raise DataPrepError(f"--source {file}: not a regular file; write its output to a file, and give that")
    return Corpus(description=described, files=tuple(file for file, _ in files), names=tuple(name for _, name in files))


def stdlib_corpus(max_mb: int | None = None, folder: Path | None = None) -> Corpus:
    """The sources of this Python's standard library, a file a document: real text that every machine has.

    Args:
        max_mb: takes the first files that together stay below so many megabytes (10^6 bytes); None takes all.
        folder: of the library, where it is not this Python's.

    Raises:
        DataPrepError: there is none, or a folder cannot be read.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = [path for path in below(folder, lambda name: name not in LEFT_OUT) if path.name.endswith(".py")]
    if not files:
        raise DataPrepError(f"{folder}: no Python sources there; this Python came without its standard library")
    description = f"Python {platform.python_version()} standard library"
    if max_mb is not None:
        ends = accumulate(file.stat().st_size for file in files)
        files = [file for file, end in zip(files, ends, strict=True) if end <= max_mb * 10**6]
        description += f", first {max_mb} MB"
    return Corpus.of(description, {file: str(file.relative_to(folder)) for file in files})
