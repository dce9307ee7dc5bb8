"""The grid of ranks, in Megatron's order: tensor fastest, then data, then pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import List, Optional, Sequence

import numpy as np
import torch.distributed as dist


@dataclass(frozen=True)
class Grid:
    """`arange(world).reshape(pipeline, data, tensor)`: every group is a slice of it."""

    tensor: int
    data: int
    pipeline: int

    @property
    def ranks(self) -> np.ndarray:
        """Rank numbers, shape [pipeline, data, tensor]."""
        world = self.tensor * self.data * self.pipeline
        return np.arange(world).reshape(self.pipeline, self.data, self.tensor)

    def data_groups(self) -> List[List[int]]:
        """Ranks with the same weights: they all-reduce gradients."""
        return self.ranks.transpose(0, 2, 1).reshape(-1, self.data).tolist()

    def tensor_groups(self) -> List[List[int]]:
        """Ranks that share layers."""
        return self.ranks.reshape(-1, self.tensor).tolist()

    def model_groups(self) -> List[List[int]]:
        """All ranks of each replica, which together have the whole model."""
        return self.ranks.transpose(1, 0, 2).reshape(self.data, -1).tolist()

    def pipeline_groups(self) -> List[List[int]]:
        """Ranks that hand activations to each other, first stage to last."""
        return self.ranks.transpose(1, 2, 0).reshape(-1, self.pipeline).tolist()

    def stage_groups(self, stages: Sequence[int]) -> List[List[int]]:
        """The ranks of these stages in each pipeline, which hold copies of a tied parameter."""
        return [[group[stage] for stage in stages] for group in self.pipeline_groups()]


@dataclass(frozen=True)
class Groups:
    """This rank's process groups; None where it is alone or not a member."""

    tensor: Optional[dist.ProcessGroup] = None
    data: Optional[dist.ProcessGroup] = None
    model: Optional[dist.ProcessGroup] = None
    forward: Optional[dist.ProcessGroup] = None
    """Activations, from a stage to the next one."""
    backward: Optional[dist.ProcessGroup] = None
    """Gradients, from a stage to the one before."""
    forward_wrap: Optional[dist.ProcessGroup] = None
    """Activations, from the last stage to the first one's next chunk: with two stages, the way of the gradients."""
    backward_wrap: Optional[dist.ProcessGroup] = None
    """Gradients, from the first stage to the last one's previous chunk."""
    tied: Sequence[Optional[dist.ProcessGroup]] = ()
    """By parameter of which several stages have a copy, in the order of `ties`."""

    @classmethod
    def make(cls, grid: Grid, chunks: int, ties: Sequence[Sequence[int]], timeout: timedelta) -> Groups:
        """Makes all groups of the grid; every rank must call it, for each group needs all ranks' consent.

        `ties` has, by tied parameter, the stages that hold a copy.
        """

        def mine(rank_lists: List[List[int]]) -> Optional[dist.ProcessGroup]:
            own = None
            for ranks in rank_lists:
                if len(ranks) > 1:
                    group = dist.new_group(ranks, timeout=timeout)
                    if dist.get_rank() in ranks:
                        own = group
            return own

        ends = grid.stage_groups((0, -1)) if chunks > 1 else []
        return cls(
            tensor=mine(grid.tensor_groups()),
            data=mine(grid.data_groups()),
            model=mine(grid.model_groups()),
            tied=[mine(grid.stage_groups(stages)) for stages in ties],
            forward=mine(grid.pipeline_groups()),
            backward=mine(grid.pipeline_groups()),
            forward_wrap=mine(ends),
            backward_wrap=mine(ends),
        )
