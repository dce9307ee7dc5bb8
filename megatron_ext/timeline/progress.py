"""What each rank of a node is doing, noted in memory that the process that forked it shares: also of one that hangs.

A rank waits for others or works by itself, since a moment. When a run stands still all ranks wait but those that
hold it up, and what the kernel says of a process tells those that somebody has stopped.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

STOPPED = ("T", "t")
"""Letters of `process_state` for a process that somebody, or a debugger, has stopped."""
_WORKS, _WAITS, _LOST = range(3)
_NAMES = ("works", "waits", "lost")
_SLOT = struct.Struct("<Bqqi100s")
"""What it does; since when (time.monotonic_ns); its iteration; length and text of what it waits for, or last did."""

_UNIX_AT_0 = time.time() - time.monotonic()

_board: Optional[mmap.mmap] = None
_offset = 0
_does, _what, _iteration = _WORKS, b"", 0


class Board:
    """Made before the ranks are forked; each writes its own slot, this process reads all of them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._offsets = {rank: number * _SLOT.size for number, rank in enumerate(ranks)}
        self._shared = mmap.mmap(-1, max(1, len(ranks)) * _SLOT.size)
        for offset in self._offsets.values():
            _SLOT.pack_into(self._shared, offset, _WORKS, time.monotonic_ns(), 0, 0, b"")

    def take(self, rank: int) -> None:
        """Has `Wait` and `iterates` write to a rank's slot, from now on, in its process."""
        global _board, _offset
        _board, _offset = self._shared, self._offsets[rank]

    def read(self, rank: int, pid: int) -> Dict[str, Any]:
        """What a rank is doing, as nodes/<node>.ranks.json says it (docs/formats.md)."""
        does, since_ns, iteration, length, what = _SLOT.unpack_from(self._shared, self._offsets[rank])
        return {
            "does": _NAMES[does],
            "what": what[:length].decode("utf-8", "replace"),
            "iteration": iteration,
            "since_unix": round(_UNIX_AT_0 + since_ns / 1e9, 3),
            "process": process_state(pid),
        }


def _note(does: int, what: bytes) -> None:
    global _does, _what
    _does, _what = does, what
    if _board is not None:
        _SLOT.pack_into(_board, _offset, does, time.monotonic_ns(), _iteration, len(what), what)


def iterates(iteration: int) -> None:
    """This rank begins an iteration, counted from 1."""
    global _iteration
    _iteration = iteration
    _note(_WORKS, b"")


class Wait:
    """Notes that this rank waits for others while the block lasts, or for its GPU, which waits for others."""

    __slots__ = ("_before", "what")

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        self._before = _does, _what
        _note(_WAITS, self.what.encode("utf-8", "replace")[:100])

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        does, what = self._before
        if kind is not None:
            _note(_LOST, _what)
        elif does == _WAITS:  # a wait within a wait
            _note(does, what)
        else:
            _note(_WORKS, _what)


def process_state(pid: int) -> str:
    """The kernel's letter, as ps shows it; ? for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
