"""What stages take, as linear functions of their layers.

Arrays are [stages, pipelines], or [parts, pipelines] where a stage has several parts of the model. Where layers are of
several kinds, a function has a slope for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasop.costs.arrays import Floats, Integers

Layers = Integers | Floats
"""Partitions: whole numbers, but in a bound also parts of layers."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """What a stage, or a part, takes, [stages, pipelines] each: `fixed + layers * layer`.

    Of layers of several kinds `layer` is [kinds, stages, pipelines], and so are `layers`.
    """

    fixed: Floats
    layer: Floats

    def of(self, layers: Layers) -> Floats:
        if self.layer.ndim == self.fixed.ndim:
            return self.fixed + layers * self.layer
        whole: Floats = self.fixed + layers[0] * self.layer[0]
        for number, layer in zip(layers[1:], self.layer[1:], strict=True):
            whole += number * layer
        return whole

    def take(self, columns: Integers) -> Linear:
        return Linear(fixed=self.fixed[:, columns], layer=self.layer[..., columns])


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What the last backward pass hides of summing the gradients (fasop/costs/overlap.py)."""

    time: Linear
    """Of the pass, after the first bucket was complete; negative where none is."""
    last: Floats
    """[stages, pipelines]: what the last bucket takes, which nothing hides."""

    def take(self, columns: Integers) -> Hidden:
        return Hidden(time=self.time.take(columns), last=self.last[:, columns])

    def left(self, sums: Linear, held: Layers) -> Floats:
        """[stages, pipelines]: seconds of the sums that are not hidden; `held` are the layers of each stage."""
        whole = sums.of(held)
        return np.minimum(whole, np.maximum(whole - self.time.of(held), self.last))

    def slopes(self, sums: Linear, held: Layers) -> Floats:
        """Seconds that `left` gains with a layer, of the shape of `sums.layer`."""
        left, whole = self.left(sums, held), sums.of(held)
        beyond = np.where(left == self.last, 0.0, sums.layer - self.time.layer)
        return np.where(left == whole, sums.layer, beyond)
