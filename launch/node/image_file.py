"""The file of a container image: whose it is, and whether it still is what it was when it was fetched.

Who can write an image chooses what the ranks run. A file that tdpp finds in `container.image_dir` is used only if it
belongs to this user or to root, and nobody else may write to it. Beside one that tdpp has fetched lies its SHA-256, in
the form of `sha256sum`; it is compared with the file's when the file has changed since.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from launch.errors import LaunchError
from launch.files.locks import name_of, other_writers
from launch.machine.container_runtimes import RunContainer
from megatron_ext.contract.files import write_atomic

_RECORD = re.compile(r"(?P<digest>[0-9a-f]{64})  \S.*\n?")
_LONGEST = 4096
"""Bytes of a record: a digest and a file name."""


@dataclass(frozen=True)
class Expected:
    """What an image file must hold."""

    digest: str
    """SHA-256, 64 hexadecimal digits."""
    said_by: str
    """The key, or the file, that says so."""


def record_of(file: Path) -> Path:
    """Where the digest of a fetched image is written down."""
    return file.with_name(f"{file.name}.sha256")


def write_record(file: Path, digest: str) -> None:
    """Writes the record once the file has its name: its time of change, which nobody can set, then shows changes."""
    write_atomic(record_of(file), f"{digest}  {file.name}\n")


def check_found(file: Path) -> None:
    """Raises LaunchError for an image file in `container.image_dir`, or its record, that others could have made.

    A file that is not there is none.
    """
    for path in (file, record_of(file)):
        if why := _why_not_own(path):
            raise LaunchError(
                f"container.image_dir={file.parent}: {path} on {socket.gethostname()} {why}, so somebody else could "
                f"have put code there; remove it to fetch the image again, or choose an image_dir of your own"
            )


def _why_not_own(path: Path) -> str | None:
    """None also if it is not there. Of a link, both its own owner and that of the file it leads to count."""
    try:
        states = [path.lstat(), path.stat()]
    except FileNotFoundError:
        return None
    for state in states:
        if state.st_uid not in (0, os.geteuid()):
            return f"belongs to {name_of(state.st_uid)}"
        others = None if stat.S_ISLNK(state.st_mode) else other_writers(state.st_mode)
        if others:
            return f"can be written by {others} (mode {stat.S_IMODE(state.st_mode):03o})"
    return None


def expected(container: RunContainer, file: Path) -> Expected | None:
    """What the file must hold, if the configuration says so, or it has changed since it was fetched."""
    if container.digest is not None:
        return Expected(container.digest.removeprefix("sha256:"), f"container.digest={container.digest}")
    record = record_of(file)
    if isinstance(container.image, Path) or not record.is_file():
        return None
    if file.stat().st_ctime_ns <= record.stat().st_mtime_ns:
        return None
    with record.open(encoding="utf-8", errors="replace") as opened:
        content = _RECORD.fullmatch(opened.read(_LONGEST))
    if content is None:
        raise LaunchError(f"{record}: not a SHA-256 as sha256sum writes it; remove it and {file}")
    return Expected(content["digest"], f"{record}, written when it was fetched, has sha256:{content['digest']}")


def check_digest(file: Path, found: str, wanted: Expected) -> None:
    """Raises LaunchError unless the file has the expected digest."""
    if found != wanted.digest:
        raise LaunchError(
            f"{file} on {socket.gethostname()} has the digest sha256:{found}, but {wanted.said_by}; it was not used. "
            "Remove it to fetch the image again, or correct the digest if this is the image that you want"
        )
