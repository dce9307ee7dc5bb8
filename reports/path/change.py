"""What may be changed in an iteration, and what that gains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reports.path.graph import Integers


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


@dataclass(frozen=True)
class Change:
    """One that a replay shows."""

    cause: Cause
    change: str
    """In words, such as "the embedding's all-reduce free"."""
    because: str
    """What the change is about, as a sentence."""
    lasts_ns: Integers
    """(edges,) of the graph."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of a change."""

    cause: Cause
    change: str
    because: str
    before_ns: int
    """An iteration without it: the one that is replayed, or the mean of all where it is about some of them."""
    period_ns: int
    """The same with it."""
    mean: bool = False
    """Whether these are means over iterations that take unequally long."""

    @property
    def share(self) -> float:
        """Of `before_ns`."""
        return 1 - self.period_ns / self.before_ns if self.before_ns else 0.0
