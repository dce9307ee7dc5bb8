"""A rank as messages name it."""

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
        """As messages name it."""
        return f"rank {self.rank} (stage {self.stage}, dp {self.dp}, tp {self.tp}, node {self.node})"
