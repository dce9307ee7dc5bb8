"""What running statistics take from an iteration: the mean over its micro-batches, of all replicas."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_ext.parallel.comm import all_reduce
from megatron_ext.tasks.running import Running


class RunningStatistics:
    """Those of a rank's stages."""

    def __init__(self, stages: Sequence[nn.Module], group: Optional[dist.ProcessGroup], micro_batches: int) -> None:
        """`group` has the replicas, which together have so many micro-batches in an iteration."""
        self._modules = [module for stage in stages for module in stage.modules() if isinstance(module, Running)]
        self._group = group
        self._micro_batches = micro_batches

    def begin(self) -> None:
        """An iteration, before its first pass."""
        for module in self._modules:
            module.gathered.zero_()

    @torch.no_grad()
    def finish(self, skipped: bool) -> None:
        """The iteration. What a pass that overflowed found counts as little as its gradients do."""
        if not self._modules:
            return
        mean = torch.cat([module.gathered for module in self._modules])
        all_reduce(mean, self._group, "all-reduce of running statistics")
        if skipped:
            return
        mean /= self._micro_batches
        sizes = [len(module.gathered) for module in self._modules]
        for module, part in zip(self._modules, torch.split(mean, sizes)):
            module.update(part)
