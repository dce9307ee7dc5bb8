"""A plan that a search found for the GPUs of a run, beside the plan that the run has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from conf.errors import ConfigError
from conf.schema.values.partition import Partition


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """How it differs from the run's.

    Making it raises ValueError for what cannot be.
    """

    iteration_s: float
    """Predicted."""
    own_s: float
    """The same of the run's plan."""
    differs: dict[str, str]
    """For each key of `parallel`, what the plan has in the place of the run's; empty where it is the run's plan."""

    def __post_init__(self) -> None:
        if not (0 < self.iteration_s < math.inf and 0 < self.own_s < math.inf):
            raise ValueError(f"iteration_s={self.iteration_s} and own_s={self.own_s} must be above 0 and finite")
        try:
            self.layers()
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def layers(self) -> tuple[int, ...] | None:
        """Return the layers of each part, where the plan differs from the run's in them alone."""
        return Partition.parse(self.differs["partition"]).layers if {*self.differs} == {"partition"} else None
