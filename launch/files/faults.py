"""What of a run's files cannot be read, or is not what it should be: it is reported, and the rest is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conf.errors import ClosedError, RunFolderError
from conf.run_folder.run_files import read_tail

T = TypeVar("T")
Other = TypeVar("Other")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One of them."""

    text: str
    """The file, and what is wrong with it."""
    closed: bool
    """Whether no more is wrong than that this user may not read it."""
    decisive: bool
    """Whether no verdict can be given without it."""


class Faults(list[Fault]):
    """Those that were found so far, each once."""

    def tried(self, read: Callable[[], T], otherwise: Other, *, decisive: bool = False) -> T | Other:
        """What `read` returns; where it raises RunFolderError, that is noted."""
        try:
            return read()
        except RunFolderError as error:
            self.add(str(error), closed=isinstance(error, ClosedError), decisive=decisive)
            return otherwise

    def tail(self, path: Path, size: int, begin: int = 0, *, decisive: bool = False) -> bytes:
        """The whole lines among the last `size` bytes of a file that may not be there yet, none from before `begin`."""
        try:
            content, cut = self.tried(lambda: read_tail(path, size, begin), (b"", False), decisive=decisive)
        except FileNotFoundError:
            return b""
        return content.partition(b"\n")[2] if cut else content

    def add(self, text: str, *, closed: bool = False, decisive: bool = False) -> None:
        fault = Fault(text=text, closed=closed, decisive=decisive)
        if fault not in self:
            self.append(fault)
