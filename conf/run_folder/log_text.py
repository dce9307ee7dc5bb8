"""The text of a log as its lines, without the bytes that terminals, launchers and crashes leave in it.

A log is redirected through a terminal (colours, progress bars), by a shell that writes UTF-16, from several processes
at once, and survives a full disk or a node without power, which leave NUL bytes. None of them may hide a line.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO

from conf.run_folder.log_lines import ITERATION, unlabelled
from conf.visible import plural

LINE_LIMIT = 1 << 26
"""Characters; what is longer is taken as several lines, so that no file can fill the memory with one."""
MOST_NUL = 1 << 28
"""NUL bytes in a row that are read where the file system does not say where a hole ends."""
_ESCAPES = r"\x1b(?:\[[0-?]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[ -/]*[0-~])"
"""Colours, cursor moves, a window's title (ECMA-48)."""
_STRAY = re.compile(rf"{_ESCAPES}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff\ufffd]")
"""Also a byte order mark, and what stands for bytes that are not UTF-8."""
_STAMP = re.compile(r" ?(?:\[[\d :.-]{1,32}\] )?$")
"""The time that Megatron-LM of today puts before an iteration."""


class LogText:
    """The lines of a log with their ends."""

    def __init__(self, file: BinaryIO) -> None:
        self._bytes = _WithoutNul(file)

    @property
    def notes(self) -> list[str]:
        """What was left out so far. NUL bytes are no loss in a text in UTF-16."""
        source = self._bytes
        if source.nul == 0 or source.wide:
            return []
        end = ", and what follows them is not read" if source.ended else ""
        return [
            f"{plural(source.nul, 'NUL byte')} left out: the file was cut while a process wrote to it, its disk was "
            f"full, or its node failed; whatever stood there is lost{end}"
        ]

    def __iter__(self) -> Iterator[str]:
        text = io.TextIOWrapper(io.BufferedReader(self._bytes, 1 << 20), encoding="utf-8", errors="replace")
        while line := text.readline(LINE_LIMIT):
            yield from pieces(line)


def pieces(line: str) -> Iterator[str]:
    """A line without stray characters and labels; in two, where an iteration's begins inside another one."""
    plain = unlabelled(line if line.isascii() and line.rstrip("\n").isprintable() else _STRAY.sub("", line))
    begins = [_begin(plain, found.start()) for found in ITERATION.finditer(plain)] if "iteration" in plain else []
    for begin, end in pairwise([0, *(at for at in begins if plain[:at].strip()), len(plain)]):
        piece = unlabelled(plain[begin:end])
        yield piece if end == len(plain) else f"{piece}\n"


def _begin(line: str, at: int) -> int:
    """Where the line of an iteration begins whose word `iteration` is there."""
    before = _STAMP.search(line[max(at - 48, 0) : at])
    return at - len(before[0]) if before is not None else at


class _WithoutNul(io.RawIOBase):
    """The bytes of a file but for NUL; so text in UTF-16, too, is read as far as it is ASCII."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._row = 0
        """NUL bytes since the last other one."""
        self.nul = 0
        self.wide = False
        """Whether the file begins with the byte order mark of UTF-16."""
        self.ended = False
        """Whether so many NUL bytes came that no more is read."""
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while found := self._file.read(len(buffer)):
            if not self._begun:
                self._begun, self.wide = True, found[:2] in (b"\xff\xfe", b"\xfe\xff")
                found = found[2:] if self.wide else found
            rest = found.replace(b"\0", b"")
            self.nul += len(found) - len(rest)
            if rest:
                self._row = 0
                buffer[: len(rest)] = rest
                return len(rest)
            self._row += len(found)
            if not self._skipped():
                break
        return 0

    def _skipped(self) -> bool:
        """Moves to the end of a hole, which may be larger than any disk; False if nothing comes any more."""
        if self._row > MOST_NUL:
            self.ended = True
            return False
        at = self._file.tell()
        try:
            after = os.lseek(self._file.fileno(), at, os.SEEK_DATA)
        except OSError:  # also: no data up to the end
            return False
        self.nul += after - at
        self._file.seek(after)
        return True
