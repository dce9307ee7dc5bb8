"""Reading what others may have written or damaged: regular files of a sensible size, without waiting and without links
where a file is made.

A run's folder may hold anything: a pipe that nobody writes to, a folder, a device, terabytes of nothing.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import ClosedError, RunFolderError
from megatron_ext.contract import files

MOST_BYTES = 1 << 28
"""The size of a file that is read as a whole, but for events: a plan of 10,000 ranks takes some 2 MB."""
MOST_DEEP = 50
"""Lists and objects of JSON within each other."""


def opened(path: Path, most: int | None = None) -> BinaryIO:
    """The file of at most so many bytes, open for reading.

    Raises:
        FileNotFoundError: it is not there.
        ClosedError: this user may not read it.
        RunFolderError: it is not a regular file, is too large, or cannot be opened.
    """
    try:
        file = files.opened(path)
    except FileNotFoundError:
        raise
    except files.NotRegular as error:
        raise RunFolderError(f"{path} is {error.kind}, not a regular file") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    size = os.fstat(file.fileno()).st_size
    if most is not None and size > most:
        file.close()
        raise RunFolderError(f"{path} has {size} bytes; at most {most} are read of such a file")
    return file


def unreadable(path: Path, error: Exception) -> RunFolderError:
    """What to raise for a file or folder that the system does not let one read."""
    kind = ClosedError if isinstance(error, PermissionError) else RunFolderError
    return kind(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file; raises as `opened`, and RunFolderError for one of more than `most` bytes."""
    for last in (False, True):
        with opened(path, most) as file:
            try:
                return files.content_of(file, most)
            except OSError as error:
                if last or error.errno != errno.ESTALE:
                    raise unreadable(path, error) from error
    raise AssertionError("either returned or raised")


def read_text(path: Path, errors: str = "strict") -> str:
    """The same as text; raises RunFolderError for what is not UTF-8, unless `errors` is such as `replace`."""
    try:
        return read_bytes(path).decode(errors=errors)
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path} is not text: byte {error.start} is not UTF-8") from error


def read_tail(path: Path, size: int, begin: int = 0) -> tuple[bytes, bool]:
    """At most `size` bytes from the end of a file, none of those before `begin`; and whether earlier ones are left out.

    Raises as `opened`.
    """
    with _reading(path) as file:
        start = file.seek(0, os.SEEK_END) - size
        file.seek(max(begin, start, 0))
        return file.read(size), start > begin


def read_part(path: Path, begin: int, size: int) -> bytes:
    """At most `size` bytes of a file from `begin` on; raises as `opened`."""
    with _reading(path) as file:
        file.seek(begin)
        return file.read(size)


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """The same as `opened`, also for what goes wrong while it is read."""
    with opened(path) as file:
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error) from error


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises RunFolderError: it is not JSON, or nested deeper than anything of tdpp's; it
    names `where`."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > MOST_DEEP:
            _require_flat(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RunFolderError(f"{where} is damaged: half of a character (such as \\ud800)") from None
    except RecursionError:  # also of _require_flat
        raise RunFolderError(f"{where} is damaged: lists or objects are nested too deeply") from None
    except ValueError as error:
        raise RunFolderError(f"{where} is not JSON: {files.why(error)}") from error
    return value


def _require_flat(value: Any) -> None:
    """Raises RecursionError for what lies too deep for those who go through it."""
    level = [value]
    for _ in range(MOST_DEEP):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def entries(folder: Path) -> list[Path]:
    """What lies in a folder of a run, sorted; nothing where there is none. Raises RunFolderError: it cannot be
    listed."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def appended(path: Path) -> BinaryIO:
    """A file of one's own, open at its end and for reading; it is made if it is not there, but never through a link.
    Raises OSError: it cannot be opened, or is a link."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o644), "a+b")
