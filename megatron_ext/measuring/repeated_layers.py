"""Layers that compute what others before them have computed: they stand by while a micro-batch is counted.

A layer of the third or a later place of its kind takes what the second one takes, so that it need not compute.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ext.tasks.task import Block, Placement

Looks = Tuple[torch.Size, torch.dtype, bool]
"""A tensor's shape, format, and whether gradients go through it."""
COMPUTED = 2
"""Layers of a kind that compute: the first one may make what others share, such as masks."""


class Repeated:
    """Which blocks stand for others, and what they give."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.like: Dict[int, int] = {}
        """For each block that is like one before it, the number of that one."""
        self._given: Dict[int, List[Looks]] = {}
        of_kind: Dict[str, List[int]] = {}
        computed: Set[int] = set()
        last = max((n for n, block in enumerate(blocks) if block.placement is Placement.COUNTED), default=-1)
        for number, block in enumerate(blocks):
            known = of_kind.setdefault(block.kind, [])
            if block.placement is Placement.COUNTED and number != last and len(known) == COMPUTED:
                self.like[number] = known[-1]
                continue
            known.append(number)
            computed |= {number, number + 1}  # what a block gives, the next one keeps
        self.standing_by = [number for number in self.like if number not in computed]

    def note(self, number: int, given: Sequence[Tensor]) -> None:
        """Takes note of what a block gives that has computed."""
        self._given[number] = [(one.shape, one.dtype, one.requires_grad) for one in given]

    def stand_by(self, number: int, module: nn.Module) -> None:
        """Has a block give tensors that look like what the one gave that it is like."""

        def forward(*taken: Tensor) -> Any:
            given: Tuple[Tensor, ...] = _Alike.apply(self._given[self.like[number]], *taken)  # type: ignore[no-untyped-call]
            return given if len(given) > 1 else given[0]

        module.forward = forward


class _Alike(Function):
    """Tensors without content, through which gradients go."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Looks], *taken: Tensor) -> Tuple[Tensor, ...]:
        ctx.taken = [(one.shape, one.dtype) for one in taken]
        device = taken[0].device
        found = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in given)
        ctx.mark_non_differentiable(*(one for one, (_, _, passes) in zip(found, given) if not passes))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Optional[Tensor], ...]:
        device = gradients[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in ctx.taken]
        return (None, *(one if needed else None for one, needed in zip(made, ctx.needs_input_grad[1:])))
