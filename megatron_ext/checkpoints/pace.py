"""How often a run saves by itself (`train.save_interval=auto`, `train.save_memory=auto`): as rarely as the time of a
save and the failures of its nodes allow."""

from __future__ import annotations

import time
from collections import deque
from typing import Callable, Deque

from megatron_ext.contract.reliability import best_interval_s

FIRST_SAVE_S = 1.0
"""What a save is taken to last until one was measured."""
_MEASURED = 5
"""The last so many saves count: a file system is not always as busy."""


class SavePace:
    """Says after which iterations one rank wants all of them to save. It measures iterations and saves."""

    def __init__(
        self,
        mtbf_s: float,
        iteration: int,
        later: int = 1,
        clock: Callable[[], float] = time.monotonic,
        key: str = "save_interval",
    ) -> None:
        """The run goes on after `iteration`; what is wanted after an iteration comes true `later` iterations after.
        `key` of `train` is what it serves."""
        self._key = key
        self._mtbf_s = mtbf_s
        self._later = later
        self._clock = clock
        self._saves: Deque[float] = deque(maxlen=_MEASURED)
        self._counted = self._last = iteration
        self._since = clock()

    @property
    def save_s(self) -> float:
        """How long a save takes."""
        return sum(self._saves) / len(self._saves) if self._saves else FIRST_SAVE_S

    def describe(self) -> str:
        """What the pace follows from, for the log."""
        every = best_interval_s(self.save_s, self._mtbf_s)
        often = f"{self._mtbf_s / 3600:,.1f} hours" if self._mtbf_s >= 7200 else f"{self._mtbf_s / 60:.3g} minutes"
        return (
            f"train.{self._key}=auto: a save takes {self.save_s:.3g} s and one of the nodes fails about every "
            f"{often}, so the run saves every {every:,.0f} s"
        )

    def wants(self, iteration: int) -> bool:
        """Called after each iteration. A save that was wanted is taken to be done, until the next one is due."""
        if iteration <= self._counted:
            return False
        each = (self._clock() - self._since) / (iteration - self._counted)
        every = max(1, round(best_interval_s(self.save_s, self._mtbf_s) / max(each, 1e-9)))
        if iteration + self._later - self._last < every:
            return False
        self._last = iteration + self._later
        return True

    def tried(self, iteration: int, seconds: float, saved: bool) -> None:
        """Takes note that all ranks saved after an iteration, for whatever reason, or failed to."""
        if saved:
            self._saves.append(seconds)
        self._last = max(self._last, iteration)
        self._counted, self._since = iteration, self._clock()
