"""The noise of a gradient, from two halves of a batch.

The mean gradient of b samples is the true one, G, and noise: E|g|^2 = |G|^2 + S / b, where S is the sum of the
variances of one sample's gradient (McCandlish et al. 2018, appendix A). Two halves with independent noise have
E<a, c> = |G|^2. The noise scale S / |G|^2 is the batch at which noise and gradient are as large as each other.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence


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
    """None where they say nothing: a half is empty, or the gradient is not finite."""
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
