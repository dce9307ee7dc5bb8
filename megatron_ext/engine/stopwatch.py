"""How long a rank works in an iteration, beside how long the iteration takes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import median
from typing import Iterator, List, Optional, Tuple

import torch


class Stopwatch:
    """Of the iterations since `take`; on a GPU, of what it does there."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = 0.0
        self._work: List[float] = []
        self._queued: List[Tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        """Of which iteration; what a GPU has begun is read when it is asked for."""
        self._whole: List[float] = []

    def begin(self) -> None:
        """An iteration."""
        self._began = time.monotonic()
        self._work.append(0.0)

    def end(self) -> None:
        """The iteration, all of whose results are there."""
        self._whole.append(time.monotonic() - self._began)

    @contextmanager
    def working(self) -> Iterator[None]:
        """What this rank does by itself: nothing in it waits for another replica."""
        if self._cuda:
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._queued.append((len(self._work) - 1, first, last))
        else:
            began = time.monotonic()
            yield
            self._work[-1] += time.monotonic() - began

    def take(self) -> Optional[Tuple[float, float]]:
        """Seconds of work and of the whole, medians over iterations; from then on it counts anew. None of none."""
        for number, first, last in self._queued:
            last.synchronize()
            self._work[number] += first.elapsed_time(last) / 1e3
        found = (median(self._work), median(self._whole)) if self._whole else None
        self._work, self._queued, self._whole = [], [], []
        return found
