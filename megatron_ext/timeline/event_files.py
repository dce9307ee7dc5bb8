"""How events come from a rank into its file, whatever ends the rank.

A rank puts its records into memory that it shares with the process that forked it, without any system call. That
process appends them to the rank's file a few times a second, and once more when the rank is gone, whether it was
killed, ran out of memory, or ended by an exception or `os._exit`. A slow disk holds up a rank only when its buffer is
full.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Mapping, Optional

from megatron_ext.contract.events import RECORD
from megatron_ext.contract.plan import Plan

_pack_into, _SIZE = RECORD.pack_into, RECORD.size  # looked up once: 5 % of what an event costs
RECORDS = 2**14
"""That a buffer holds, half a MiB: a rank that leaves 1,000 events a second fills it in 16 s."""
PERIOD_S = 0.25
"""From one look for new records to the next."""
_COUNTS = struct.calcsize("2Q")
_ROOM_S = 0.001


class EventBuffer:
    """Records of one rank in memory that forked processes share. One process puts them in, another one takes them."""

    def __init__(self, records: int = RECORDS) -> None:
        self._size = records * RECORD.size
        memory = memoryview(mmap.mmap(-1, _COUNTS + self._size))
        self._counts = memory[:_COUNTS].cast("Q")
        """Bytes put in, and bytes taken, since the beginning."""
        self._ring = memory[_COUNTS:]
        self._put = 0
        self._limit = self._size

    def put(
        self, name: int, chunk: int, iteration: int, micro_batch: int, peer: int, start_ns: int, end_ns: int
    ) -> None:
        """Adds a record. Waits while the buffer is full: no event is lost to a slow disk."""
        at = self._put
        if at == self._limit:
            self._wait_for_room()
        _pack_into(self._ring, at % self._size, name, chunk, iteration, micro_batch, peer, start_ns, end_ns)
        self._put = self._counts[0] = at + _SIZE

    @property
    def end(self) -> int:
        """Bytes put in since the beginning."""
        return self._counts[0]

    def waiting(self, end: int) -> bytes:
        """What was put in up to `end` and not taken yet."""
        start = self._counts[1] % self._size
        stop = start + end - self._counts[1]
        return bytes(self._ring[start:stop]) + bytes(self._ring[: max(0, stop - self._size)])

    def take(self, size: int) -> None:
        """Makes room: so many bytes of what is waiting are not needed any more."""
        self._counts[1] += size

    def _wait_for_room(self) -> None:
        while self._counts[1] + self._size == self._put:
            time.sleep(_ROOM_S)
        self._limit = self._counts[1] + self._size


class EventFile:
    """Appends what a rank puts into its buffer to its file, which the rank has begun."""

    def __init__(self, path: Path, buffer: EventBuffer) -> None:
        self._path = path
        self._buffer = buffer
        self._seen = 0
        self._file: Optional[int] = None
        self._end = 0
        """Where the next record goes in the file."""
        self._lost = 0

    def write(self, last: bool = False) -> None:
        """Writes what was there at the look before, and with `last` all of it.

        A record's bytes may become visible after the count that covers it, on some processors, but not that much later.
        What cannot be written is given up, or the rank would have to wait for a disk that stays full.
        """
        upto, self._seen = self._seen, self._buffer.end
        waiting = self._buffer.waiting(self._seen if last else upto)
        if waiting:
            self._lost += (len(waiting) - self._append(waiting)) // RECORD.size
            self._buffer.take(len(waiting))
        if last and self._lost:
            _say(f"{self._path}: {self._lost} events were lost")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, content: bytes) -> int:
        """How many bytes were written; a record that was cut off does not count, and the next one takes its place."""
        written = 0
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY)
                self._end = os.fstat(self._file).st_size
            while written < len(content):
                written += os.pwrite(self._file, content[written:], self._end + written)
        except OSError as error:
            if not self._lost:
                _say(f"{self._path}: cannot be written: {error.strerror}; events are lost")
        written -= written % RECORD.size
        self._end += written
        return written


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class EventFiles:
    """The files of a node's ranks, written by a thread of the process that forked them."""

    def __init__(self, plan: Plan, buffers: Mapping[int, EventBuffer]) -> None:
        self._files = [EventFile(plan.files.rank_events(rank), buffer) for rank, buffer in buffers.items()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="events", daemon=True)

    def start(self) -> None:
        """Begins after the last fork: a process with several threads had better not fork. Signals are not the
        thread's."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def finish(self) -> None:
        """Writes all that is left, when the ranks are gone."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for file in self._files:
            file.write(last=True)
            file.close()

    def _write(self) -> None:
        while not self._over.wait(PERIOD_S):
            for file in self._files:
                file.write()
