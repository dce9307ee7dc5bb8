"""The hidden folder beside data in the making, from which an interrupted command goes on.

.<name>.partial/
    lock             held by the process that works here
    recipe.json      what the data follow from: the folder is of use for nothing else
    journal.json     how far the files beside it are on the disk
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.errors import DataPrepError
from megatron_ext.contract.errors import DataError
from megatron_ext.contract.files import read_regular, write_atomic
from megatron_ext.data.indexed_dataset import data_file

LOCK = "lock"
RECIPE = "recipe.json"
JOURNAL = "journal.json"
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems say that are mounted without locks, as Lustre may be, or NFS whose servers run no daemon for them:
two processes cannot then see each other."""


def work_folder_of(prefix: Path) -> Path:
    """Where the data of this prefix are made."""
    return prefix.with_name(f".{prefix.name}.partial")


@contextmanager
def work_folder(prefix: Path, recipe: dict[str, Any]) -> Iterator[Path]:
    """The folder for data of this recipe, which may be begun already; what another recipe left in it is deleted.

    It goes away at the end, but for one with a journal, from which an interrupted command can go on.

    Raises:
        DataPrepError: another process works in it, or it, or what the block writes, cannot be written.
    """
    try:
        with _locked(prefix, json.dumps(recipe)) as folder:
            yield folder
    except DataError as error:
        raise DataPrepError(str(error)) from error
    except OSError as error:
        raise DataPrepError(
            f"{error.filename or prefix}: cannot be written ({error.strerror}); choose a folder that you may write to "
            "and that has room, or make room: the same command continues where it stopped"
        ) from error


@contextmanager
def _locked(prefix: Path, recipe: str) -> Iterator[Path]:
    folder = work_folder_of(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(0o755, exist_ok=True)
    _require_own(folder)
    with (folder / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataPrepError(
                f"{prefix}: another process is preparing these data ({folder}); wait for it, or choose another --output"
            ) from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        _take_up(folder, recipe)
        try:
            yield folder
        finally:
            if not (folder / JOURNAL).exists():
                shutil.rmtree(folder)


def publish(folder: Path, prefix: Path, files: Mapping[str, str], manifest: str) -> None:
    """Gives the files of a work folder their names, `<prefix><suffix>`, the manifest `<prefix>.json` last.

    An older manifest goes away first, so that it never lies beside new data.

    Args:
        folder: the work folder.
        prefix: of the data.
        files: names in the folder by suffix; all are on the disk.
        manifest: its text.
    """
    described, new = data_file(prefix, ".json"), folder / "manifest.json"
    write_atomic(new, manifest)
    (folder / JOURNAL).unlink(missing_ok=True)
    described.unlink(missing_ok=True)
    for suffix, name in files.items():
        (folder / name).replace(data_file(prefix, suffix))
    new.replace(described)


def _take_up(folder: Path, recipe: str) -> None:
    """Empties the folder if it was begun by another recipe."""
    noted = folder / RECIPE
    if not _holds(noted, recipe):
        for path in folder.iterdir():
            if path.name != LOCK:
                path.unlink()
        write_atomic(noted, recipe)


def _holds(path: Path, text: str) -> bool:
    try:
        return read_regular(path) == text.encode()
    except OSError:
        return False


def _require_own(folder: Path) -> None:
    """Raises DataPrepError unless it is a folder that this user alone may write in.

    In a shared folder somebody else could have made it first: a link to a folder of ours, or a folder with links to
    files of ours, which would then be emptied.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        why = "is a link, or a file"
    elif found.st_uid != os.geteuid():
        why = "belongs to another user"
    elif found.st_mode & 0o022:
        why = f"can be written by others (mode {stat.S_IMODE(found.st_mode):03o})"
    else:
        return
    raise DataPrepError(
        f"{folder} {why}: what lies in it may be a trap; look at it, delete it, and run the same command again"
    )
