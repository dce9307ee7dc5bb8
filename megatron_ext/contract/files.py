"""Files that somebody names: they may be devices, pipes that nobody writes to, or of any size."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Iterator, Tuple

MOST_BYTES = 1 << 26
"""Of a file that is read whole: some two million actions of a schedule."""

CHUNK_BYTES = 1 << 20
"""Read at once: Python takes memory for what it is asked for, however small the file is."""


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more bytes; nothing waits for a writer.
    """
    with open_regular(path) as (file, size):
        if size > most_bytes:
            raise OSError(errno.EFBIG, "it has {} bytes, more than {}".format(size, most_bytes), str(path))
        parts, left = [], most_bytes + 1
        while left > 0 and (part := file.read(min(CHUNK_BYTES, left))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


@contextmanager
def open_regular(path: Path) -> Iterator[Tuple[BinaryIO, int]]:
    """A regular file to read, and its size in bytes; raises as `read_regular` does."""
    handle = os.open(str(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with os.fdopen(handle, "rb") as file:
        yield file, found.st_size


def why(error: BaseException) -> str:
    """In words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "too deep" if isinstance(error, RecursionError) else str(error)
