"""The noise of a gradient, from two halves of a batch.

The mean gradient of b samples is the true one, G, and noise: E|g|^2 = |G|^2 + S / b, where S is the sum of the
variances of one sample's gradient (McCandlish et al. 2018, appendix A). Two halves with independent noise have
E<a, c> = |G|^2. The noise scale S / |G|^2 is the batch at which noise and gradient are as large as each other.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import List, NamedTuple, Optional, Sequence


class Halves(NamedTuple):
    """Sums over the whole model, of the gradient of a global batch and of the part of it that is of its even
    micro-batches: together with the part of the odd ones it is the whole."""

    even: float
    """The squared norm of that part."""
    whole: float
    """That of the whole gradient."""
    product: float
    """The dot product of both."""
    weight: float
    """The part of the batch's weight that the even micro-batches have."""
    even_samples: int
    odd_samples: int


class Measurement(NamedTuple):
    """What the halves of one batch say."""

    similarity: float
    """The cosine of their mean gradients; nan where one is zero."""
    signal: float
    """An unbiased estimate of the squared norm of the true gradient; may be negative."""
    noise: float
    """An unbiased estimate of the sum of the variances of one sample's gradient."""


def measurement(halves: Halves) -> Optional[Measurement]:
    """Returns what the halves say; None where that is nothing: a half is empty, or the gradient is not finite."""
    part, rest = halves.weight, 1.0 - halves.weight
    odd = halves.whole - 2.0 * halves.product + halves.even
    if not (0.0 < part < 1.0 and halves.even_samples and halves.odd_samples and math.isfinite(odd)):
        return None
    even_square, odd_square = halves.even / part**2, max(0.0, odd) / rest**2
    signal = (halves.product - halves.even) / (part * rest)
    samples = 2.0 / (1.0 / halves.even_samples + 1.0 / halves.odd_samples)
    norms = math.sqrt(even_square) * math.sqrt(odd_square)
    return Measurement(
        similarity=signal / norms if norms else math.nan,
        signal=signal,
        noise=((even_square + odd_square) / 2.0 - signal) * samples,
    )


def noise_scale(measured: Sequence[Measurement]) -> float:
    """Samples, from several measurements; infinite where no gradient was seen above the noise.

    Signal and noise are averaged apart: the mean of their ratios would be that of the smallest signals.
    """
    signal = sum(one.signal for one in measured)
    return sum(one.noise for one in measured) / signal if signal > 0.0 else math.inf


def similarity(measured: Sequence[Measurement]) -> float:
    """The mean of those that are known."""
    known = [one.similarity for one in measured if not math.isnan(one.similarity)]
    return sum(known) / len(known) if known else math.nan


def sought_batch(target: float, scale: float) -> float:
    """The batch whose halves have such a similarity on average: 1 / (1 + 2 scale / batch)."""
    return 2.0 * target / (1.0 - target) * scale


class Noise:
    """The noise scale over consumed samples: a straight line of its logarithm between two points, and constant before
    the first and behind the last one."""

    def __init__(self, samples: Sequence[float], scales: Sequence[float]) -> None:
        """`samples` go upwards, and there is one at least; `scales` are above 0, in samples."""
        self.samples = tuple(samples)
        self.scales = tuple(scales)
        self._logarithms = [math.log(scale) for scale in scales]
        found: List[float] = []
        before = 0.0
        for at, value, following in zip(self.samples, self._logarithms, self._logarithms[1:]):
            step = following - value
            if step * before < 0.0:
                found.append(at)
            before = step or before
        self.turns = tuple(found)
        """The samples at which it begins to grow after it has fallen, or the other way round."""

    def at(self, samples: float) -> float:
        """The noise scale when so many samples were trained."""
        place = bisect_right(self.samples, samples)
        if place in (0, len(self.samples)):
            return self.scales[min(place, len(self.samples) - 1)]
        (x, y), (end, last) = ((self.samples[n], self._logarithms[n]) for n in (place - 1, place))
        return math.exp(y + (last - y) * ((samples - x) / (end - x)))


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
