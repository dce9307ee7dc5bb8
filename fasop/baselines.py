"""How others divide the layers, to compare with and to start from. They know no memory: look at `Pipelines.fits`."""

from __future__ import annotations

import numpy as np

from conf.partition import Partition
from fasop.pipelines import Pipelines
from fasop.placement import Integers


def even(pipelines: Pipelines, layers: int) -> Integers:
    """Megatron's split, the same number of layers for every part; where that is none, as even as possible."""
    split = Partition.even(layers, pipelines.parts_count).layers
    return np.repeat(np.array([split]).T, len(pipelines), axis=1)


def minmax(pipelines: Pipelines, layers: int) -> Integers:
    """The heuristic of the public FASOP (HPDC 2024): from the even split, a layer goes from the largest part to the
    smallest for as long as that makes the largest one smaller. Every part keeps a layer, if it had one.
    """
    found = even(pipelines, layers)
    active = np.arange(len(pipelines)) if pipelines.parts_count > 1 else np.arange(0)
    while len(active):
        lines, here = pipelines.take(active), found[:, active]
        parts = lines.forward.of(here) + lines.backward.of(here)
        every = np.arange(len(active))
        source, target = np.argmax(parts, axis=0), np.argmin(parts, axis=0)
        moved = here.copy()
        moved[source, every] -= 1
        moved[target, every] += 1
        largest = (lines.forward.of(moved) + lines.backward.of(moved)).max(axis=0)
        gained = (here[source, every] > 1) & (largest < parts.max(axis=0))
        active = active[gained]
        found[:, active] = moved[:, gained]
    return found
