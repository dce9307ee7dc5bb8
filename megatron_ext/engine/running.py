"""What running statistics take from an iteration: the mean over its micro-batches, of all replicas."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.parallel.comm import all_reduce
from megatron_ext.tasks.running import Running


class RunningStatistics:
    """Keeps the running statistics of a rank's stages."""

    def __init__(self, stages: Sequence[nn.Module], group: Optional[dist.ProcessGroup]) -> None:
        """`group` has the replicas."""
        self._modules = [module for stage in stages for module in stage.modules() if isinstance(module, Running)]
        self._group = group

    def begin(self) -> None:
        """Forgets what was gathered: before the first pass of an iteration."""
        for module in self._modules:
            module.gathered.zero_()

    def gathered(self) -> Optional[Tensor]:
        """A copy of what passes have left since `begin`; None without such statistics."""
        return torch.cat([module.gathered for module in self._modules]) if self._modules else None

    def finish(self, micro_batches: int, skipped: bool) -> None:
        """An iteration of so many, over all replicas. What a pass that overflowed found counts as little as its
        gradients do."""
        found = self.gathered()
        if found is not None:
            self.take(found, micro_batches, skipped)

    @torch.no_grad()
    def take(self, mean: Tensor, micro_batches: int, skipped: bool = False) -> None:
        """What all replicas gathered, of which `mean` is this one's, from so many micro-batches."""
        all_reduce(mean, self._group, "all-reduce of running statistics")
        if skipped:
            return
        mean /= micro_batches
        sizes = [len(module.gathered) for module in self._modules]
        for module, part in zip(self._modules, torch.split(mean, sizes)):
            module.update(part)
