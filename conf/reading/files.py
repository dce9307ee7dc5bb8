"""Files that commands write: a folder that lives as long as a command, and results that users name.

The folder is made only when it is needed, and cleared even after a kill: a process that is killed leaves its folder.
Each holds a lock on its own, which ends with it, so that the next command of the same user that makes one clears away
those without a lock. Whether a result can be written is known before the work is done, and it is written whole.
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

from conf.errors import OutputError, reworded
from conf.reading.own_folders import is_file
from megatron_ext.contract.files import write_atomic

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


def why_not_writable(path: Path) -> str | None:
    """In words, with a way out; None if there can be such a file."""
    try:
        if path.is_dir():
            return "this is a folder; give the path of a file"
        if not path.parent.is_dir():
            return f"no folder {path.parent}; create it, or choose another one"
        if os.access(path if _is_device(path) else path.parent, os.W_OK, effective_ids=True):
            return None
    except PermissionError:  # a folder above is closed
        pass
    except OSError as error:  # the name is too long
        return f"{error.strerror}; give another path"
    return "permission denied; choose a folder that you may write to"


def why_not_kept(name: str, path: Path, instead: str | None = None) -> str | None:
    """The same of what is kept under a name in the file `path`, whose folder is made if it is missing. `instead` is the
    way out where the name cannot be a file's path."""
    if not is_file(name):
        instead = instead or f"give the path of a file instead, such as ./{name}.yaml"
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot create {folder}: {error.strerror}; {instead}"
        if not os.access(folder, os.W_OK, effective_ids=True):
            return f"you may not write to {folder}; {instead}"
    return why_not_writable(path)


def check_writable(*paths: Path | None) -> None:
    """Raises OutputError before a command begins, so that no time is lost and either all of its files are there or
    none. A file that is None is not asked for."""
    for path in paths:
        if path is not None and (why := why_not_writable(path)) is not None:
            raise OutputError(f"cannot write {path}: {why}")


def check_free(path: Path, given: str, *, replace: bool, kept_as: str | None = None, more: str = "") -> None:
    """The same for a file that may be there already.

    Args:
        path: of the file.
        given: the word of the command line that names it.
        replace: whether it is replaced, or added to.
        kept_as: the name under which it is kept in a folder of configurations, or its path.
        more: another way out than another name and overwrite=true.
    """
    why = why_not_writable(path) if kept_as is None else why_not_kept(kept_as, path)
    if why is not None:
        raise OutputError(f"{given}: {why}")
    if path.exists() and not replace:
        raise OutputError(f"{given}: {path} already exists; choose another name, or {more}add overwrite=true")


def write_whole(path: Path, text: str) -> None:
    """Writes a result: what is there stays until the new one is complete; a link is replaced, not followed. Raises
    OutputError: it cannot be written."""
    with reworded(OutputError, f"cannot write {path}: ", "; choose a folder with free space that you may write to"):
        if _is_device(path):  # or a pipe: nothing takes its place
            path.write_text(text, encoding="utf-8")
        else:
            write_atomic(path, text)


def _is_device(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())
