"""Sums of gradients over a group that go on beside the backward pass, in the format in which they travel.

gloo has no reduce-scatter: on a CPU each rank hands the others their shares and adds up its own, in fp32 and in the
order of the ranks, which sends as few bytes.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor


class Summing(NamedTuple):
    """A sum under way."""

    work: dist.Work
    sent: Tensor
    """What travels, of all ranks of the group."""
    finish: Optional[Callable[[], object]]
    """Puts the sum in its place when the work has ended; None if it is there."""

    def wait(self) -> None:
        """Until the sum is in its place; with NCCL only the GPU waits."""
        self.work.wait()
        if self.finish is not None:
            self.finish()


def begin_all_reduce(gradients: Tensor, group: Optional[dist.ProcessGroup], dtype: torch.dtype) -> Summing:
    """Sums `gradients`, fp32, in place on all ranks."""
    sent = gradients.to(dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    return Summing(work, sent, None if sent is gradients else lambda: gradients.copy_(sent))


def begin_reduce_scatter(
    gradients: Tensor, own: Tensor, group: Optional[dist.ProcessGroup], dtype: torch.dtype
) -> Summing:
    """Sums of `gradients`, fp32, this rank's share: `own`, which is its part of them."""
    sent = gradients.to(dtype)
    if sent.is_cuda:
        share = own if sent is gradients else sent[_offset(gradients, own) :][: len(own)]
        work = dist.reduce_scatter_tensor(share, sent, group=group, async_op=True)
        return Summing(work, sent, None if share is own else lambda: own.copy_(share))
    shares = torch.empty_like(sent)
    work = dist.all_to_all_single(shares, sent, group=group, async_op=True)
    return Summing(work, sent, lambda: torch.sum(shares.view(-1, len(own)), 0, dtype=own.dtype, out=own))


def _offset(whole: Tensor, part: Tensor) -> int:
    return int(part.storage_offset() - whole.storage_offset())
