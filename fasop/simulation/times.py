"""What simulations of many pipelines at once take, and what they say of the longest chain of waits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats


class Times(NamedTuple):
    """What stages take for one micro-batch."""

    forward: Floats
    """[parts, pipelines]; part c * stages + s is chunk c of stage s."""
    backward: Floats
    """Likewise; of a split backward pass each half takes half of it."""
    send_forward: Floats
    """[stages, pipelines]: from the end of a forward pass until the following stage has its result."""
    send_backward: Floats
    """Likewise, until the stage before has it."""
    start: Floats
    """[stages, pipelines]: when a stage begins."""

    def take(self, columns: NDArray[np.int64]) -> Times:
        return Times(*(_some(kind, columns) for kind in self))


class Traffic(NamedTuple):
    """How messages occupy the links that they leave by."""

    forward: Floats
    """[stages, pipelines]: seconds until the link takes the next message."""
    backward: Floats
    one_way_out: NDArray[np.bool_]
    """[stages]: whether a stage's messages to both neighbours leave by the same link."""

    @classmethod
    def whole(cls, times: Times) -> Traffic:
        """Of links that take no message before the last one has arrived."""
        stages = len(times.start)
        return cls(times.send_forward, times.send_backward, np.full(stages, stages == 2))

    def take(self, columns: NDArray[np.int64]) -> Traffic:
        return Traffic(_some(self.forward, columns), _some(self.backward, columns), self.one_way_out)


def _some(values: Floats, columns: NDArray[np.int64]) -> Floats:
    """Of some pipelines; what all have in common has one column."""
    return values if values.shape[1] == 1 else values[:, columns]


class Longest(NamedTuple):
    """The chain of passes and messages, each waiting for the one before, that ends last: how often a pass is on it."""

    forward: Floats
    """[parts, pipelines]"""
    backward: Floats
    """[parts, pipelines]; half a pass counts one half."""
    start: Floats
    """[stages, pipelines]: 1 for the stage whose start it begins with."""
    end: Floats
    """[stages, pipelines]: 1 for the stage with whose last action it ends."""
    total: Floats
    """[pipelines]: when it ends, with what comes after."""


def last_of(now: Floats) -> Floats:
    """[stages, pipelines]: 1 for the stage that ends last, of equal ones the first; `now` is when each ends."""
    last = np.zeros_like(now)
    last[np.argmax(now, axis=0), np.arange(now.shape[1])] = 1
    return last
