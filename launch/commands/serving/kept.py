"""What is made of runs, kept until their files change."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from conf.run_folder.rundir import RunDir

T = TypeVar("T")
FRESH_S = 5.0
"""What is made of a run is not made again for so long; longer where making it takes more than a tenth of it."""
LOOK_S = 30.0
"""A run whose files stay as they are is looked at again after so long: it may stand still, or its job be gone."""
SHARE = 9


@dataclass
class _Entry(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: T | None = None
    files: frozenset[tuple[str, int, int]] = frozenset()
    made: float = 0.0
    took_s: float = 0.0
    """Of a processor: what else runs on the machine makes nothing older."""


class Kept(Generic[T]):
    """What `make` gives for runs, the latest `most` of them. Threads may ask at the same time."""

    def __init__(self, make: Callable[[RunDir], T], is_over: Callable[[T], bool], most: int) -> None:
        self._make = make
        self._is_over = is_over
        self._most = most
        self._lock = threading.Lock()
        self._entries = OrderedDict[RunDir, _Entry[T]]()

    def of(self, run: RunDir) -> tuple[T, float]:
        """It, and how many seconds it may be shown before it is asked for again. Raises what `make` raises."""
        with self._lock:
            entry = self._entries.setdefault(run, _Entry())
            self._entries.move_to_end(run)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        with entry.lock:  # a second one who asks waits for what the first one has made
            if entry.value is None or self._is_stale(entry, entry.value, run):
                began, entry.files = time.thread_time(), _files(run)
                entry.value = self._make(run)
                entry.made = time.monotonic()
                entry.took_s = time.thread_time() - began
            return entry.value, max(FRESH_S, SHARE * entry.took_s)

    def _is_stale(self, entry: _Entry[T], value: T, run: RunDir) -> bool:
        age = time.monotonic() - entry.made
        if age < max(FRESH_S, SHARE * entry.took_s):
            return False
        return _files(run) != entry.files or (age > LOOK_S and not self._is_over(value))


def _files(run: RunDir) -> frozenset[tuple[str, int, int]]:
    """Names, times and sizes of the files that a page is made from."""
    found = set()
    for folder in (run.path, run.nodes, run.events, run.errors):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False):
                        found.add((entry.path, status.st_mtime_ns, status.st_size))
        except OSError:  # not there yet, or not any more
            continue
    return frozenset(found)
