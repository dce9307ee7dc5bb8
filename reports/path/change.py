"""What may be changed in an iteration, and what that gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from reports.path.graph import Integers

MANY = 9
"""Iterations of which the range of a gain leaves out the smallest and the largest: one of them may be a hiccup."""


class Cause(StrEnum):
    """What a change is about."""

    RANK = "slow rank"
    LINK = "slow link"
    PARTITION = "uneven partition"
    SHARES = "uneven shares"
    DATA = "data loading"
    EMBEDDING = "embedding"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    TENSOR = "tensor group"
    OPTIMIZER = "optimizer"
    HOST = "host"
    BETWEEN = "between iterations"
    PLAN = "plan"


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a change is, for people."""

    cause: Cause
    change: str
    """The change in words, such as "no time for the embedding's all-reduce"."""
    because: str
    """A sentence on why it was tried."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the configuration with the values that make the change, if they can."""


@dataclass(frozen=True, kw_only=True)
class Change(Described):
    """A change that a replay shows."""

    lasts_ns: Sequence[Integers]
    """For each graph that is replayed, (edges,) of it."""
    healthy_ns: Sequence[Integers] | None = None
    """The same where what the change is about takes what it would on healthy, equal hardware; None if that is the
    change."""


@dataclass(frozen=True, kw_only=True)
class Gain(Described):
    """What a change gains."""

    before_ns: int
    """An iteration without it: the median of those replayed, or the mean of all where it is about some of them."""
    shares: Sequence[float]
    """What it gains in each of some iterations, as a part of the iteration; negative where it loses."""
    excess: Sequence[float] = ()
    """What each of these iterations takes beyond what its plan would on healthy, equal hardware, as far as the change
    is about that, as a part of the iteration without waits for CPU cores; none where that cannot be told."""
    mean: bool = False
    """Whether it is about iterations that take unequally long, and `before_ns` is a mean."""

    @property
    def share(self) -> float:
        """The median of `shares`."""
        return float(np.median(self.shares))

    @property
    def period_ns(self) -> int:
        """An iteration with the change."""
        return round(self.before_ns * (1 - self.share))

    @property
    def least(self) -> float:
        """The smallest of `shares`, without one outlier where MANY or more are known."""
        return sorted(self.shares)[_left_out(self.shares)]

    @property
    def most(self) -> float:
        """The largest of `shares`, without one outlier where MANY or more are known."""
        return sorted(self.shares)[-1 - _left_out(self.shares)]

    @property
    def usual_excess(self) -> float:
        """The median of `excess`."""
        return float(np.median(self.excess)) if len(self.excess) else 0.0

    @property
    def least_excess(self) -> float:
        """The smallest of `excess`, without one outlier where MANY or more are known."""
        return sorted(self.excess)[_left_out(self.excess)] if len(self.excess) else 0.0


def _left_out(shares: Sequence[float]) -> int:
    return 1 if len(shares) >= MANY else 0
