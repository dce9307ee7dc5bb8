"""The noise of the gradient over a training, as it is expected: what a controller sees where nothing is computed."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import List, Sequence, Tuple

from megatron_ext.contract.adaptive.noise import Halves


class Noise:
    """The noise scale over consumed samples: a straight line of its logarithm between two points, and constant before
    the first and behind the last one."""

    def __init__(self, samples: Sequence[float], scales: Sequence[float]) -> None:
        """`samples` go upwards, and there is one at least; `scales` are above 0, in samples."""
        self.samples = tuple(samples)
        self.scales = tuple(scales)
        self._logarithms = [math.log(scale) for scale in scales]
        self.turns = self._turns()
        """The samples at which it begins to grow after it has fallen, or the other way round."""

    def at(self, samples: float) -> float:
        """The noise scale when so many samples were trained."""
        place = bisect_right(self.samples, samples)
        if place in (0, len(self.samples)):
            return self.scales[min(place, len(self.samples) - 1)]
        (x, y), (end, last) = ((self.samples[n], self._logarithms[n]) for n in (place - 1, place))
        return math.exp(y + (last - y) * ((samples - x) / (end - x)))

    def _turns(self) -> Tuple[float, ...]:
        found: List[float] = []
        before = 0.0
        for at, value, following in zip(self.samples, self._logarithms, self._logarithms[1:]):
            step = following - value
            if step * before < 0.0:
                found.append(at)
            before = step or before
        return tuple(found)


def halves(scale: float, even_samples: int, odd_samples: int) -> Halves:
    """What both halves of a batch say on average, where the noise scale is this one.

    Of a gradient of norm 1: the mean gradient of b samples has the squared norm 1 + scale / b, and the product of both
    halves is 1.
    """
    samples = even_samples + odd_samples
    if not odd_samples:  # a single micro-batch says nothing
        return Halves(0.0, 0.0, 0.0, 1.0, samples, 0)
    part = even_samples / samples
    even_square = part**2 * (1.0 + scale / even_samples)
    odd_square = (1.0 - part) ** 2 * (1.0 + scale / odd_samples)
    both = part * (1.0 - part)
    return Halves(
        even=even_square,
        whole=even_square + 2.0 * both + odd_square,
        product=even_square + both,
        weight=part,
        even_samples=even_samples,
        odd_samples=odd_samples,
    )
