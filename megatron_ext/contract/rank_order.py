"""Where ranks stand: Megatron's order, tensor fastest, then data, then pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple


def stage_dp_tp(rank: int, tensor: int, data: int) -> Tuple[int, int, int]:
    """Stage, replica and place in the tensor group of a rank: rank = (stage * data + dp) * tensor + tp."""
    return rank // (tensor * data), rank // tensor % data, rank % tensor


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
