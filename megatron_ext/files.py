"""Files that somebody names: they may be devices, pipes that nobody writes to, or of any size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 1 << 26
"""Of a file that is read whole: some two million actions of a schedule."""


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more bytes; nothing waits for a writer.
    """
    handle = os.open(str(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, "it has {} bytes, more than {}".format(found.st_size, most_bytes), str(path))
        return file.read(most_bytes + 1)


def why(error: BaseException) -> str:
    """In words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "too deep" if isinstance(error, RecursionError) else str(error)
