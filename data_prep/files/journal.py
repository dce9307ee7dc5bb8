"""Work in steps that append to files, noted in a journal so that an interrupted command goes on in the middle of one.

A step goes through items in an order that never changes. Whatever its files hold beyond what the journal notes is cut
off before the step goes on with the next item.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, typed
from data_prep.errors import DataPrepError
from data_prep.files.work_folder import JOURNAL
from megatron_ext.contract.files import read_regular, why, write_atomic
from megatron_ext.data.indexed_dataset import sync

SAVE_EVERY_S = 15.0
"""At most so much work is lost when a command is interrupted."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """Of one step, as the journal has it."""

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


class Step:
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
    """Of the steps of one command in its work folder.

    Raises:
        DataPrepError: when made: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / JOURNAL
        self._steps = self._read() if self._path.exists() else {}

    def finished(self, step: str) -> Counter[str] | None:
        """What a finished step has counted; None if it is not finished."""
        noted = self._steps.get(step, NOT_BEGUN)
        return Counter(noted.counts) if noted.finished else None

    @contextmanager
    def step(self, name: str, files: Sequence[str]) -> Iterator[Step]:
        """Goes on with an unfinished step; it is finished when the block ends well.

        What was done is noted, too, where the block is interrupted by Ctrl-C.

        Raises:
            DataPrepError: a file is shorter than noted.
        """
        noted = self._steps.get(name, NOT_BEGUN)
        with ExitStack() as stack:
            opened = {file: self._open(file, noted.sizes.get(file, 0), stack) for file in files}
            step = Step(self, name, opened, noted)
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
