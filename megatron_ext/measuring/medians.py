"""How well a median is known: its confidence interval, from the measurements alone."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

LEAST = 10
"""Measurements for which the interval means something."""
_Z = 1.96
"""Of the normal distribution, for 95 %."""


class Median(NamedTuple):
    value: float
    spread: float
    """Half of the 95 % confidence interval; inf with less than `LEAST` measurements."""

    def tight(self, whole: float, relative: float, of_whole: float) -> bool:
        """Whether the spread is at most a part of the value, or a part of a whole in which it hardly counts."""
        return self.spread <= max(relative * self.value, of_whole * whole)


def median(values: Sequence[float]) -> Median:
    """With the interval between two order statistics, which assumes nothing of how the values are distributed.

    Conover 1999, section 3.2, in its normal approximation.
    """
    ordered, count = sorted(values), len(values)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    if count < LEAST:
        return Median(middle, math.inf)
    low = math.floor(count / 2 - _Z * math.sqrt(count) / 2)
    return Median(middle, (ordered[count - 1 - low] - ordered[low]) / 2)
