"""What a rank takes for the parts of an iteration."""

from __future__ import annotations

from dataclasses import dataclass

from fasop.simulation.ranks.replay import StageTimes


@dataclass(frozen=True, kw_only=True)
class RankDurations:
    """What a rank takes; seconds. What ranks do together takes all of them the same."""

    times: StageTimes
    gradients: float
    embedding: float
    optimizer: float
    """The step and, with a sharded optimizer, handing out its results."""
    weights: float
    """Handing them out alone."""
