"""Processes of one machine as workers of unequal speed: a pass takes as long as it is given, and no less.

The model computes as ever, and whoever is ready early sleeps through the rest of its pass, inside what the timeline
records of it. So losses are real, and times are those of the pace as long as the machine keeps up with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

VARIABLE = "BENCHMARK_PACE_MS"
"""Of the environment: milliseconds of a micro-batch by node, joined by commas."""
FORWARD = 1 / 3
"""The part of a micro-batch's time that its forward pass takes."""
SITECUSTOMIZE = "import benchmarks.pacing\n\nbenchmarks.pacing.begin()\n"
"""A module of this name, in a folder of PYTHONPATH, has Python begin with it."""


def begin() -> None:
    """In a worker, gives its passes the pace of its node; elsewhere nothing."""
    if VARIABLE in os.environ and "megatron_ext.worker" in sys.orig_argv:
        paced(float(os.environ[VARIABLE].split(",")[int(sys.argv[-1] if sys.argv[-1:] else sys.orig_argv[-1])]) / 1e3)


def paced(micro_batch_s: float) -> None:
    """Has each micro-batch of this process take so long."""
    from megatron_ext.timeline.recorder import Recorder

    span = Recorder.span
    seconds: Mapping[str, float] = {
        "forward-compute": FORWARD * micro_batch_s,
        "backward-compute": (1.0 - FORWARD) * micro_batch_s,
    }

    @contextmanager
    def no_shorter(recorder: Recorder, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        began = time.monotonic()
        with span(recorder, name, *args, **kwargs):
            yield
            time.sleep(max(0.0, began + seconds.get(name, 0.0) - time.monotonic()))

    Recorder.span = no_shorter  # type: ignore[assignment, method-assign]
