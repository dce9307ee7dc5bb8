"""A folder for what lives as long as a command: made only when it is needed, and cleared even after a kill.

A process that is killed leaves its folder. Each holds a lock on its own, which ends with it, so that the next command
of the same user that makes one clears away those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PREFIX = "tdpp-scratch-"
YOUNG_S = 60.0
"""A folder that has just been made may not be locked yet."""


class Scratch:
    """A context in which there is a folder, if anybody asks for it."""

    def __init__(self) -> None:
        self._made: Path | None = None
        self._handle = -1

    @property
    def path(self) -> Path:
        if self._made is None:
            _clear(Path(tempfile.gettempdir()))
            self._made = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._handle = os.open(self._made, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._made

    @property
    def files(self) -> list[Path]:
        """What lies in the folder, if there is one."""
        return [] if self._made is None else sorted(self._made.iterdir())

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            os.close(self._handle)
            self._made = None


def _clear(folder: Path) -> None:
    """Removes what killed processes of this user have left."""
    for entry in os.scandir(folder):
        if not entry.name.startswith(PREFIX):
            continue
        with suppress(OSError):  # another process clears it, too
            handle = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(handle)
                if found.st_uid == os.geteuid() and time.time() - found.st_mtime > YOUNG_S:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path)
            finally:
                os.close(handle)
