"""A lock that is a file: it ends with the last process that has the file open."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """Closing it, or dying, lets go of it. The file's time of change says when it was last taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = path.open("ab")

    def try_take(self, how: int) -> bool:
        """Takes it shared or alone, in the place of what was held before; False if another process is in the way, and
        then what was held before is lost, too."""
        while True:
            try:
                fcntl.flock(self.file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._is_there():
                os.utime(self.file.fileno())
                return True
            self.file.close()  # somebody has removed it meanwhile: the next one would take another file
            self.file = self._path.open("ab")

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    @property
    def busy(self) -> str:
        """What is waited for when it cannot be taken."""
        return f"another process to release {self._path}"

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def is_free(path: Path) -> bool:
    """Whether nobody holds it at this moment. It stays as it is, its time of change too."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
