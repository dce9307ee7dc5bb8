"""A progress bar on stderr for what goes through files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megatron_ext.data.indexed_dataset import data_file

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Part(Protocol):
    """A part of what is read."""

    @property
    def position(self) -> int:
        """Bytes that have been read for all up to here."""


Read = TypeVar("Read", bound=Part)


class Show:
    """One bar: the bytes read of all there are, and what became of them."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def reading(self, chunks: Iterator[Read]) -> Iterator[Read]:
        """The same chunks; the bar moves as they are taken."""
        for chunk in chunks:
            yield chunk
            self._progress.update(self._task, completed=chunk.position)

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def tokens(self, count: int) -> None:
        self.note(f"{count:,} tokens")

    def note(self, text: str) -> None:
        """Stands behind the bar."""
        self._progress.update(self._task, note=text)

    def sha256(self, path: Path) -> str:
        """Hashes a file, in hexadecimal digits; the bar moves as it is read."""
        with path.open("rb") as file:
            reader: Any = self._progress.wrap_file(file, task_id=self._task)
            return hashlib.file_digest(reader, "sha256").hexdigest()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)


@contextmanager
def shown(what: str, size: int | None, *, stays: bool = True) -> Iterator[Show]:
    """A bar for `what` is done to so many bytes or items, None where nobody knows how many; it ends where the block
    ends, and goes away if it is not to stay."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    console = Console(stderr=True)
    unseen = not stays and not console.is_terminal
    with Progress(*columns, console=console, transient=not stays, disable=unseen) as progress:
        yield Show(progress, progress.add_task(what, total=size, note=""))


def hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of files by suffix; shows progress on stderr."""
    with shown("hashing the data", sum(path.stat().st_size for path in files.values()), stays=False) as show:
        return {suffix: show.sha256(path) for suffix, path in files.items()}


def unchanged(sha256: Mapping[str, str], prefix: Path) -> bool:
    """Whether the files `<prefix><suffix>` are there and have these hashes, by suffix."""
    files = {suffix: data_file(prefix, suffix) for suffix in sha256}
    return all(path.is_file() for path in files.values()) and hashes(files) == sha256
