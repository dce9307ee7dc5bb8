"""The longest paths of waits of one layout, linear in the layers of each stage: cuts for `fasop.partition.exact`.

A replay is sums and maxima of times that are linear in the layers of each stage, so the iteration is convex in them.
Where such a function is linear on both sides of a point in the direction of every stage, it has a gradient there, and
nowhere lies below the plane through that point (Rockafellar 1970, theorems 25.1 and 25.2). Steps to both sides show
that, and the gradient, to rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.simulation.linear import Layers
from fasop.simulation.ranks.columns import ColumnReplay
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages

ASIDE = 0.02
"""Layers by which a point is moved at most, away from where paths are equally long."""
STEP = 1e-3
"""Layers, to both sides."""
BENT = 1e-12
"""The part of an iteration from which steps to both sides do not lie on a line: rounding is below it."""
ROUNDING = 1e-6
"""The part of an iteration that a plane is lowered by: more than what rounding and `BENT` leave unseen."""
MOVED = 4
"""How often a point is moved."""
COLUMNS = 4096
"""Partitions that are replayed together, at most."""


class LongestPaths:
    """Paths that take so long with some division of the layers among the stages; no partition takes less."""

    def __init__(self, stages: HeterogeneousStages, replay: ColumnReplay, layers: int) -> None:
        self._stages, self._replay = stages.unhidden(layers), replay

    def longest(self, divisions: Layers) -> tuple[Floats, Floats]:
        """Return what `Paths.longest` says; there may be no path for a few divisions."""
        left, random = np.asarray(divisions, float), np.random.default_rng(0)
        slopes, constants = list[Floats](), list[Floats]()
        for _ in range(MOVED):
            moved = left + random.uniform(-ASIDE, ASIDE, left.shape)
            here, gradient, smooth = self._gradients(moved)
            slopes.append(gradient[:, smooth])
            constants.append((here * (1 - ROUNDING) - (gradient * moved).sum(axis=0))[smooth])
            left = left[:, ~smooth]
            if not left.shape[1]:
                break
        return np.concatenate(slopes, axis=1), np.concatenate(constants)

    def _gradients(self, points: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Seconds at points, [stages, points] what they gain with a layer, and whether the points have gradients."""
        stages, many = points.shape
        steps = np.concatenate([np.zeros((stages, 1)), STEP * np.eye(stages), -STEP * np.eye(stages)], axis=1)
        every = (points[:, :, np.newaxis] + steps[:, np.newaxis]).reshape(stages, -1)
        taken = self._seconds(every).reshape(many, -1)
        here, above, below = taken[:, 0], taken[:, 1 : stages + 1], taken[:, stages + 1 :]
        bend = np.abs(above + below - 2 * here[:, np.newaxis])
        smooth: NDArray[np.bool_] = np.all(bend <= BENT * here[:, np.newaxis], axis=1)
        return here, ((above - below) / (2 * STEP)).T, smooth

    def _seconds(self, divisions: Floats) -> Floats:
        parts = [divisions[:, begin : begin + COLUMNS] for begin in range(0, divisions.shape[1], COLUMNS)]
        return np.concatenate([self._replay.seconds(self._stages.columns(part)) for part in parts])
