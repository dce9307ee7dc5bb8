"""errors/rank-*.json: why a rank ended, as its worker writes it and whoever looks at the run reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """A rank with its stage, its numbers among the replicas and in its tensor group, and the name of its node."""

    rank: int
    stage: int
    dp: int
    tp: int
    node: str

    @property
    def place(self) -> str:
        """The rank as messages name it."""
        return f"rank {self.rank} (stage {self.stage}, dp {self.dp}, tp {self.tp}, node {self.node})"


KILLED = "Killed"
"""The `type` of a failure of a rank that a signal ended."""


@dataclass(frozen=True)
class RankFailure(RankPlace):
    """The failure of a rank."""

    start: str
    """Which start of the run it was; empty for a worker that was started by hand."""
    unix: float
    type: str
    """Name of the exception, or `KILLED`."""
    message: str
    traceback: str = ""
    symptom: bool = False
    """Whether the rank only lost another one."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that cannot be."""
        for key in ("rank", "stage", "dp", "tp"):
            if getattr(self, key) < 0:
                raise ValueError("{}={} must be 0 or more".format(key, getattr(self, key)))
        if not 0 <= self.unix < 1e11:
            raise ValueError(f"unix={self.unix} must be seconds since 1970")
