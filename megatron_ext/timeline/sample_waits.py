"""How long a rank waits for its samples, for the alarm that a run's data come more slowly than before."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Callable

EVERY_S = 60.0
"""A line stands for the iterations of so many seconds, at least."""


class SampleWaits:
    """Appends to waits/rank-*.jsonl what the rank's iterations waited for their samples on average."""

    def __init__(self, path: Path, iteration: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`iteration` is the last one before this start; a rank that reads no samples has no file."""
        self._path = path
        self._clock = clock
        self._iteration, self._waited, self._since = iteration, 0.0, clock()

    def note(self, iteration: int, waited_s: float) -> None:
        """Called after each iteration with the seconds that the rank has waited since the start."""
        now = self._clock()
        if now - self._since < EVERY_S or waited_s == 0.0:
            return
        each_ms = 1e3 * (waited_s - self._waited) / (iteration - self._iteration)
        line = {"iteration": iteration, "unix": time.time(), "wait_ms": round(each_ms, 3)}
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._iteration, self._waited, self._since = iteration, waited_s, now
