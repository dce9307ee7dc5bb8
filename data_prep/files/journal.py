"""Work in steps that append to files, noted in a journal so that an interrupted command goes on in the middle of one.

A step goes through items in an order that never changes. Whatever its files hold beyond what the journal notes is cut
off before the step goes on with the next item.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, typed
from data_prep.errors import DataPrepError, named
from megatron_ext.contract.files import read_regular, why, write_atomic
from megatron_ext.data.indexed_dataset import data_file, sync

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
        with named(), _locked(prefix, json.dumps(recipe)) as folder:
            yield folder
    except OSError as error:
        kept = (work_folder_of(prefix) / JOURNAL).exists()
        again = "the same command continues where it stopped" if kept else "the same command begins again"
        raise DataPrepError(
            f"{error.filename or prefix}: cannot be written ({error.strerror}); choose a folder that you may write to "
            f"and that has room, or make room: {again}"
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
        noted = folder / RECIPE
        if not _holds(noted, recipe):
            for path in folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
            write_atomic(noted, recipe)
        try:
            yield folder
        finally:
            if not (folder / JOURNAL).exists():
                shutil.rmtree(folder)


def publish(folder: Path, prefix: Path, files: Mapping[str, str], manifest: str, older: Iterable[Path] = ()) -> None:
    """Gives the files of a work folder their names, `<prefix><suffix>`, the manifest `<prefix>.json` last.

    An older manifest goes away first, so that it never lies beside new data.

    Args:
        files: names in the folder by suffix; all are on the disk.
        older: files of older data that must not lie beside new ones; they go away after the older manifest.
    """
    described, new = data_file(prefix, ".json"), folder / "manifest.json"
    write_atomic(new, manifest)
    (folder / JOURNAL).unlink(missing_ok=True)
    for path in (described, *older):
        path.unlink(missing_ok=True)
    for suffix, name in files.items():
        (folder / name).replace(data_file(prefix, suffix))
    new.replace(described)


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


SAVE_EVERY_S = 15.0
"""At most so much work is lost when a command is interrupted."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """How far one step is, as the journal has it."""

    items: Count = 0
    """That are done."""
    finished: bool = False
    sizes: dict[str, Count]
    """Bytes of its files."""
    counts: dict[str, Count]


NOT_BEGUN = Noted(sizes={}, counts={})


@dataclass(frozen=True, kw_only=True)
class _Content:
    steps: dict[str, Noted]


class OpenStep:
    """A step at work: its files, open at their ends, and what it has counted."""

    def __init__(self, journal: Journal, name: str, files: dict[str, BinaryIO], noted: Noted) -> None:
        self._journal = journal
        self._name = name
        self._saved = time.monotonic()
        self.files = files
        self.items = noted.items
        self.counts = Counter(noted.counts)
        self._whole = noted
        """How far the step was when an item was last done: an interruption may come in the middle of one."""

    def done(self, items: int) -> None:
        """So many items more are in the files, whole; notes that from time to time."""
        self.items += items
        self._whole = self._noted()
        if time.monotonic() - self._saved >= SAVE_EVERY_S:
            self.save()

    def finish(self) -> None:
        self._whole = replace(self._noted(), finished=True)
        self.save()

    def save(self) -> None:
        """Notes the items that are done."""
        for file in self.files.values():
            sync(file)
        self._journal.note(self._name, self._whole)
        self._saved = time.monotonic()

    def _noted(self) -> Noted:
        sizes = {name: file.tell() for name, file in self.files.items()}
        return Noted(items=self.items, sizes=sizes, counts=dict(self.counts))


class Journal:
    """Notes how far the steps of one command are, in its work folder. Raises DataPrepError when made: it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / JOURNAL
        self._steps = self._read() if self._path.exists() else {}

    def finished(self, step: str) -> Counter[str] | None:
        """What a finished step has counted; None if it is not finished."""
        noted = self._steps.get(step, NOT_BEGUN)
        return Counter(noted.counts) if noted.finished else None

    @contextmanager
    def step(self, name: str, files: Sequence[str]) -> Iterator[OpenStep]:
        """Goes on with an unfinished step; it is finished when the block ends well.

        What was done is noted, too, where the block is interrupted by Ctrl-C.

        Raises:
            DataPrepError: a file is shorter than noted.
        """
        noted = self._steps.get(name, NOT_BEGUN)
        with ExitStack() as stack:
            opened = {file: self._open(file, noted.sizes.get(file, 0), stack) for file in files}
            step = OpenStep(self, name, opened, noted)
            try:
                yield step
            except KeyboardInterrupt:
                step.save()
                raise
            step.finish()

    def note(self, name: str, noted: Noted) -> None:
        self._steps[name] = noted
        write_atomic(self._path, json.dumps(asdict(_Content(steps=self._steps))))

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)

    def _open(self, name: str, size: int, stack: ExitStack) -> BinaryIO:
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise DataPrepError(
                f"{path}: expected at least {size} bytes, as {self._path} says, found {path.stat().st_size}; delete "
                f"{self.folder} and run the same command again"
            )
        file = stack.enter_context(path.open("r+b", 1 << 20))
        file.truncate(size)
        file.seek(size)
        return file

    def _read(self) -> dict[str, Noted]:
        way_out = f"delete {self.folder} and run the same command again"
        try:
            return typed(_Content, json.loads(read_regular(self._path)), str(self._path)).steps
        except RunFolderError as error:
            raise DataPrepError(f"{error}; {way_out}") from error
        except (ValueError, RecursionError) as error:
            raise DataPrepError(f"{self._path}: damaged ({why(error)}); {way_out}") from error
