"""The ends of epochs of an elastic run, at which one of its node agents chooses the nodes of the next epoch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress

from conf.run_folder.run_files import read_text
from conf.run_folder.rundir import RunDir
from launch.node.choice import Logged, chosen, epoch_of
from launch.node.regroup import Company, saved
from megatron_ext.contract.plan import Plan

LOOK_S = 1.0
"""Between two looks at the log."""
TAIL_BYTES = 4096
"""In which its last line is."""


class EpochEnds:
    """Of one start, as the first node of its plan sees them."""

    def __init__(self, run: RunDir, plan: Plan, company: Company, began_unix: float) -> None:
        self._run = run
        self._plan = plan
        self._company = company
        self._began_unix = began_unix
        self._epoch: int | None = None
        self._looked = 0.0

    def look(self) -> None:
        """Asks for other nodes where an epoch has ended, and the next one takes less on those."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        last = self._last()
        if last is None:
            return
        if self._epoch is None:
            self._epoch = epoch_of(self._plan, self._consumed_before())
        if last <= self._epoch:
            return
        self._epoch = last
        with suppress(ValueError):  # no nodes can take the batches that are forecast: these go on as long as they can
            found = chosen(self._plan, self._company.available, [logged for logged, _ in self._lines()])
            if found is not None:
                self._company.ask_for(*found)

    def _last(self) -> int | None:
        """The epoch of the newest iteration; None before this start has logged any."""
        try:
            with self._run.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        whole = [line for line in lines[-2:] if line.endswith(b"\n")]
        if not whole:
            return None
        line = json.loads(whole[-1])
        return epoch_of(self._plan, line["consumed_samples"]) if line["unix"] > self._began_unix else None

    def _consumed_before(self) -> float:
        """Samples, where this start began."""
        iteration = saved(self._run)
        return next((logged.consumed for logged, number in self._lines() if number == iteration), 0.0)

    def _lines(self) -> Iterator[tuple[Logged, int]]:
        """What was logged, and its iterations."""
        for text in read_text(self._run.metrics).splitlines(keepends=True):
            if text.endswith("\n"):
                line = json.loads(text)
                batch = line.get("global_batch_size", self._plan.global_batch_size)
                yield Logged(line["consumed_samples"], batch, line["elapsed_ms"] / 1e3), line["iteration"]
