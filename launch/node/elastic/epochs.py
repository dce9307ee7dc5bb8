"""The ends of epochs of an elastic run, at which one of its node agents chooses the nodes of the next epoch."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from conf.run_folder.rundir import RunDir
from launch.node.elastic.choice import Logged, chosen, epoch_of
from launch.node.elastic.regroup import Company, saved
from launch.tracking.metrics_file import MetricsFile
from megatron_ext.contract.plan import Plan

LOOK_S = 1.0
"""Between two looks at the log."""


class EpochEnds:
    """Of one start, as the first node of its plan sees them."""

    def __init__(self, run: RunDir, plan: Plan, company: Company, began_unix: float) -> None:
        self._run = run
        self._plan = plan
        self._company = company
        self._began_unix = began_unix
        self._metrics = MetricsFile(run.metrics)
        self._lines: list[dict[str, Any]] = []
        """Of the log, as far as it was read."""
        self._epoch: int | None = None
        self._looked = 0.0

    def look(self) -> None:
        """Asks for other nodes where an epoch has ended, and the next one takes less on those."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._read()
        if not self._lines or self._lines[-1]["unix"] <= self._began_unix:  # this start has logged nothing yet
            return
        last = epoch_of(self._plan, self._lines[-1]["consumed_samples"])
        if self._epoch is None:
            self._epoch = epoch_of(self._plan, self._consumed_before())
        if last <= self._epoch:
            return
        self._epoch = last
        plan, logged = self._company.measured_plan(), [self._logged(line) for line in self._lines]
        with suppress(ValueError):  # no nodes can take the batches that are forecast: these go on as long as they can
            found = chosen(plan, self._company.available, logged)
            if found is not None:
                self._company.ask_for(*found)

    def _read(self) -> None:
        lines, cut = self._metrics.new_lines()
        if cut:
            self._lines.clear()
        self._lines += lines

    def _consumed_before(self) -> float:
        """Samples, where this start began."""
        iteration = saved(self._run)
        return next((line["consumed_samples"] for line in self._lines if line["iteration"] == iteration), 0.0)

    def _logged(self, line: dict[str, Any]) -> Logged:
        batch = line.get("global_batch_size", self._plan.global_batch_size)
        return Logged(line["consumed_samples"], batch, line["elapsed_ms"] / 1e3)
