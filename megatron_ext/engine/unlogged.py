"""Iterations that the log has no line for yet, kept where they outlive the rank that logs.

With train.log_interval=100 a loss that stops being finite at iteration 99 would leave no loss in the log, and the rank
that logs may be killed before it could write one. It notes each iteration in memory that it shares with the process
that forked it; once the ranks have ended otherwise than they should, that process writes a line for each.
"""

from __future__ import annotations

import mmap
import struct
from typing import List

_LENGTH = struct.Struct("Q")
ROOM = 2**20
"""Bytes for lines, some 2,000 iterations. Where that is not enough the oldest half is given up."""


class Unlogged:
    """A line for each iteration since the last one that was logged, in their order."""

    def __init__(self, room: int = ROOM) -> None:
        self._memory = mmap.mmap(-1, _LENGTH.size + room)
        self._room = room

    def add(self, line: str) -> None:
        """Adds a line. One that is cut off by the rank's death does not count."""
        content = line.encode() + b"\n"
        kept = self._lines()
        if len(kept) + len(content) > self._room:
            self.clear()
            kept = kept[kept.index(b"\n", len(kept) // 2) + 1 :]
            self._put(0, kept)
        self._put(len(kept), content)

    def clear(self) -> None:
        _LENGTH.pack_into(self._memory, 0, 0)

    def lines(self) -> List[str]:
        return self._lines().decode().splitlines()

    def _lines(self) -> bytes:
        begin, (length,) = _LENGTH.size, _LENGTH.unpack_from(self._memory)
        return self._memory[begin : begin + length]

    def _put(self, at: int, content: bytes) -> None:
        begin = _LENGTH.size + at
        self._memory[begin : begin + len(content)] = content
        _LENGTH.pack_into(self._memory, 0, at + len(content))
