"""Reading files that somebody names, which may be devices, pipes that nobody writes to, or of any size; and writing
small ones whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional, Tuple, Type, Union

MOST_BYTES = 1 << 26
"""The size of a file that is read whole: some two million actions of a schedule."""

CHUNK_BYTES = 1 << 20
"""Read at once: Python takes memory for what it is asked for, however small the file is."""


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises OSError: it cannot be read, is not a regular file, or has more bytes;
    nothing waits for a writer."""
    with open_regular(path) as (file, size):
        if size > most_bytes:
            raise OSError(errno.EFBIG, "it has {} bytes, more than {}".format(size, most_bytes), str(path))
        return content_of(file, most_bytes + 1)


def read_regular_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The same as text, without a byte order mark; also raises UnicodeDecodeError for what is not UTF-8."""
    return read_regular(path, most_bytes).decode("utf-8-sig")


def digest_of_file(path: Path) -> str:
    """SHA-256 of what `read_regular` gives, in hexadecimal digits; raises as it does."""
    return hashlib.sha256(read_regular(path)).hexdigest()


def read_json(path: Path, kind: Type[Exception], fault: str = "cannot be read", way_out: str = "") -> Any:
    """The JSON of a regular file. Raises `kind`, whose message names the file, the `fault`, its reason and the
    `way_out`: it cannot be read, or is no JSON."""
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:  # the last one of lists within lists
        raise kind("{}: {}: {}{}".format(path, fault, why(error), way_out and "; " + way_out)) from error


@contextmanager
def open_regular(path: Path) -> Iterator[Tuple[BinaryIO, int]]:
    """A regular file to read, and its size in bytes; raises as `read_regular` does."""
    with opened(path) as file:
        yield file, os.fstat(file.fileno()).st_size


class NotRegular(OSError):
    """`kind` says what it is instead."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))
        self.kind = next((words for is_one, words in _KINDS if is_one(mode)), "something else")


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def opened(path: Path) -> BinaryIO:
    """A regular file, open for reading; nothing waits for a writer.

    Raises:
        NotRegular: it is something else.
        OSError: it cannot be opened.
        ValueError: its name holds a byte 0.
    """
    handle = _handle(path)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise NotRegular(path, mode)
    return os.fdopen(handle, "rb")


def _handle(path: Path) -> int:
    """Opens a file that may be replaced at any time: over NFS (version 3) its reader may then find the old one
    stale."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(str(path), flags)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return os.open(str(path), flags)


def content_of(file: BinaryIO, most_bytes: int) -> bytes:
    """At most so many bytes of a file."""
    parts, left = [], most_bytes
    while left > 0 and (part := file.read(min(CHUNK_BYTES, left))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write_atomic(path: Path, content: Union[str, bytes], durable: bool = True, mode: int = 0o644) -> None:
    """Writes so that a reader finds the old content or the new one, never a part; `durable`: after a crash, too.

    Others can read it as far as the `mode` and the umask let them; only its user can write to it.
    """
    temporary = path.with_name(".{}.{}".format(path.name, os.urandom(8).hex()))
    handle = os.open(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def json_line(text: str) -> Optional[Dict[str, Any]]:
    """The object of a line, before which a node that failed may have left NUL bytes; None if it is none."""
    try:
        value = json.loads(text.strip("\0"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, content: object) -> None:
    """Writes whole what a run's next moment will replace; a crash may lose it."""
    write_atomic(path, json.dumps(content) + "\n", durable=False)


def why(error: BaseException) -> str:
    """In words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ValueError) and "int_max_str_digits" in str(error):
        return "a whole number has too many digits"
    return "too deep" if isinstance(error, RecursionError) else str(error)


def user_cache() -> Path:
    """tdpp's part of the user's cache, as freedesktop.org's base directories say."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache")) / "tdpp"  # noqa: PTH111, PTH117


class GrowingNote:
    """One process writes it; any other reads it with `read_note`."""

    def __init__(self, path: Path, **values: Any) -> None:
        self._path = path
        self._values: Dict[str, Any] = {}
        self.update(**values)

    def update(self, **values: Any) -> None:
        """Adds to what is written, or replaces it."""
        self._values.update(values)
        write_json(self._path, self._values)


def read_note(path: Path) -> Optional[Dict[str, Any]]:
    """What a note says so far; None while there is none."""
    try:
        content: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
