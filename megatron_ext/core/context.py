"""Ranks that share sequences: which tokens each has, and attention over those of all.

A rank has two of 2 x `context` pieces of a sequence, one from either end, so that causal attention is as much work for
each (Megatron-Core's `get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.parallel.comm import all_gather, all_reduce
from megatron_ext.tasks.task import Micro


def places(length: int, context: int, rank: int) -> Tensor:
    """[length / context]: which places of a sequence a rank of a context group has, rising."""
    piece = length // (2 * context)
    first, last = rank * piece, (2 * context - 1 - rank) * piece
    return torch.cat([torch.arange(first, first + piece), torch.arange(last, last + piece)])


class OwnTokens:
    """What a rank has of micro-batches."""

    def __init__(self, plan: Plan, place: Place, device: torch.device) -> None:
        length = plan.model.sequence_length
        self._length, self._context = length, plan.context or 1
        self.positions = places(length, self._context, place.dp % self._context).to(device)
        """[own tokens]: their places in the sequence."""

    def of(self, micro: Micro) -> Micro:
        """The own part of each tensor [samples, sequence]; a weight counts the own labels alone."""
        if self._context == 1:
            return micro
        inputs, targets = (
            {name: self._own(tensor) for name, tensor in held.items()} for held in (micro.inputs, micro.targets)
        )
        weight = None if micro.weight is None else targets["loss_mask"].sum()
        return micro._replace(inputs=inputs, targets=targets, weight=weight)

    def _own(self, tensor: Tensor) -> Tensor:
        whole = tensor.dim() > 1 and tensor.shape[1] == self._length
        return tensor.index_select(1, self.positions) if whole else tensor


class _Gather(torch.autograd.Function):
    """[own tokens, …] of each rank of a group -> [all tokens, …], in the order of the ranks. Gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = own.new_empty(group.size(), *own.shape)
        all_gather(own.contiguous(), whole, group, "gathering a sequence's keys and values")
        return whole.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        summed = gradient.clone(memory_format=torch.contiguous_format)  # gloo has no reduce-scatter
        all_reduce(summed, ctx.group, "summing gradients of a sequence's keys and values")
        return summed.chunk(ctx.group.size())[ctx.group.rank()], None


def gathered(own: Tensor, group: Any) -> Tensor:
    """Keys and values [own tokens, batch, heads, widths] of each rank -> [all tokens, batch, heads, widths]."""
    whole: Tensor = _Gather.apply(own, group)  # type: ignore[no-untyped-call]
    return whole


@lru_cache(maxsize=8)
def seen(own: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """[own tokens, all tokens]: which of the `gathered` places each of the own ones attends to: itself and those
    before it."""
    of_each = [places(own * ranks, ranks, one) for one in range(ranks)]
    mask: Tensor = torch.cat(of_each) <= of_each[rank][:, None]
    return mask.to(device)
