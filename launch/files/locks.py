"""Whose a run is and what another user may do with it: root may stop it, and nobody else can go on with it. And locks
of files that end with their holder, among them the one that says that a run is being launched."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conf.errors import RunFolderError, reworded
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError


def owner_of(run: RunDir) -> int:
    """The id of the user who started the run: its jobs and processes are that user's."""
    return run.path.stat().st_uid


def has_rights_of(user: int) -> bool:
    """Whether this process sees and ends what is that user's."""
    return os.geteuid() in (0, user)


def check_may_stop(run: RunDir) -> None:
    """Raises LaunchError unless this user can end the run's jobs and processes."""
    owner = owner_of(run)
    if not has_rights_of(owner):
        raise LaunchError(
            f"{run.path}: the run belongs to {name_of(owner)}, and user {name_of(os.geteuid())} cannot end its "
            f"processes; only {' or '.join(dict.fromkeys([name_of(owner), 'root']))} can stop it"
        )


def check_may_resume(run: RunDir) -> None:
    """Raises LaunchError unless the run is this user's own: what root starts would be root's, in another's folder."""
    owner, user = owner_of(run), os.geteuid()
    if owner == user:
        return
    way_out = f"start a run of your own with train.load={run.path} to continue from its checkpoint"
    if user == 0:
        way_out = f"use 'runuser -u {name_of(owner)} -- tdpp launch resume={run.path}', or {way_out}"
    raise LaunchError(
        f"resume={run.name}: the run belongs to {name_of(owner)}, but its jobs would run as user "
        f"{name_of(user)}; {way_out}"
    )


def other_writers(mode: int) -> str | None:
    """Who may write to a file or folder beside its owner, by its mode; None if nobody may."""
    if mode & stat.S_IWOTH:
        return "everybody"
    return "its group" if mode & stat.S_IWGRP else None


def name_of(user: int) -> str:
    """A user id that has no name, as in some containers, is given as a number."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


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


_FLOCK = "hhqqi0q"
"""struct flock (fcntl(2)): type, whence, start, length, process."""
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@contextlib.contextmanager
def launching(run: RunDir) -> Iterator[None]:
    """Holds the lock while the run is launched; a process that is forked meanwhile goes on with it. Raises LaunchError:
    another process launches it, or its folder cannot be written."""
    with reworded(LaunchError, f"{run.launch_lock}: cannot be written (", ")"):
        handle = os.open(run.launch_lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            except (BlockingIOError, PermissionError):
                raise LaunchError(f"{run.name} is being launched by {launcher(run)}; wait until that is done") from None
        with contextlib.suppress(OSError):  # a full disk: what matters is the lock
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(_myself()).encode())
        yield
    finally:
        os.close(handle)


def is_launching(run: RunDir) -> bool | None:
    """Whether another process launches the run; None where that cannot be known from here."""
    try:
        handle = os.open(run.launch_lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        held = struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0] != fcntl.F_UNLCK
    except OSError:
        return None
    finally:
        os.close(handle)
    who = _read(run)
    if held:
        return (who.get("host"), who.get("pid")) != (socket.gethostname(), os.getpid())
    # A file system may keep locks to the machine that they were taken on.
    return False if who.get("host") == socket.gethostname() else None


def launcher(run: RunDir) -> str:
    """Who launched the run last, for a message."""
    who = _read(run)
    if not who:
        return "an unknown process"
    return f"process {who.get('pid')} of {who.get('user')} on {who.get('host')}"


def _myself() -> dict[str, Any]:
    return {"user": name_of(os.geteuid()), "host": socket.gethostname(), "pid": os.getpid(), "unix": time.time()}


def _read(run: RunDir) -> dict[str, Any]:
    """What the launcher wrote; nothing where that was cut off."""
    try:
        content = run.read_json(run.launch_lock)
    except RunFolderError:
        return {}
    return content if isinstance(content, dict) else {}
