"""Megatron-Core's layers that compute and then sleep; as a worker, what `tdpp profile` runs with them on a rank.

A core that has slept, or worked at something else for a while, computes a small layer half as fast as one that does
nothing but compute it. So layers that are to sleep in a run are measured with a sleep after each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.sleeping import Pass, Sleep
from megatron_ext import profile, worker
from megatron_ext.core.families import CoreFamily

SLEEP = Pass(forward=0.030, backward=0.045)
"""A layer's, in seconds."""


def sleeping(make: Callable[..., nn.Module], times: float = 1.0) -> Callable[..., nn.Module]:
    """Makes chunks as `make` does, whose layers sleep so many times `SLEEP` after they have computed."""

    def made(*of: Any) -> nn.Module:
        chunk: Any = make(*of)
        for layer in chunk.decoder.layers:
            layer.forward = partial(_then_sleeps, layer.forward, times)
        return chunk

    return made


def _then_sleeps(forward: Callable[..., tuple[Tensor, Any]], times: float, *given: Any, **named: Any) -> Any:
    left, context = forward(*given, **named)
    slept = Sleep.apply(left, times * SLEEP.forward, lambda: time.sleep(times * SLEEP.backward))  # type: ignore[no-untyped-call]
    return slept, context


if __name__ == "__main__":
    CoreFamily.make = sleeping(CoreFamily.make)  # type: ignore[method-assign]
    sys.exit(worker.main(sys.argv[1:], profile.measure))
