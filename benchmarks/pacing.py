"""Processes of one machine as workers of unequal speed: passes take as long as they are given, and no less.

The model computes as ever, and whoever is ready early sleeps through the rest of its pass, inside what the timeline
records of it. What comes late makes the next pass shorter. So losses are real, and an iteration's passes together take
what they are given as long as the machine keeps up with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

VARIABLE = "BENCHMARK_PACE_MS"
"""The environment's variable: milliseconds of a micro-batch by node, joined by commas."""
FORWARD = 1 / 3
"""The part of a micro-batch's time that its forward pass takes."""
SITECUSTOMIZE = "import benchmarks.pacing\n\nbenchmarks.pacing.begin()\n"
"""A module of this name, in a folder of PYTHONPATH, has Python begin with it."""


def begin() -> None:
    """In a worker, gives its passes the pace of its node; elsewhere nothing."""
    if VARIABLE in os.environ and "megatron_ext.worker" in sys.orig_argv:
        node = int(sys.orig_argv[-1])
        paced(float(os.environ[VARIABLE].split(",")[node]) / 1e3)


def paced(micro_batch_s: float) -> None:
    """Has each micro-batch of this process take so long."""
    from megatron_ext.timeline.recorder import Recorder

    span, due = Recorder.span, 0.0
    seconds: Mapping[str, float] = {
        "forward-compute": FORWARD * micro_batch_s,
        "backward-compute": (1.0 - FORWARD) * micro_batch_s,
    }

    @contextmanager
    def until_due(recorder: Recorder, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        nonlocal due
        if name == "batch-generator":  # the first that an iteration does
            due = time.monotonic()
        due += seconds.get(name, 0.0)
        with span(recorder, name, *args, **kwargs):
            yield
            if name in seconds:
                time.sleep(max(0.0, due - time.monotonic()))

    Recorder.span = until_due  # type: ignore[assignment, method-assign]
