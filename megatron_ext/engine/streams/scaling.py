"""The loss scale of a stage that updates by itself, in fp16.

Each stage has a scaler of its own, which all of its ranks agree on. The last one multiplies its losses by its scale;
the others multiply the gradients that they receive by their scale over the sender's, which is sent along. An update
whose gradient is not finite leaves the weights as they are. It then counts against the stage's own scale, unless the
gradient had arrived like that from a stage with a larger one, which lowers its scale itself.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.engine.executor.executor import LOSS
from megatron_ext.engine.executor.messages import Content
from megatron_ext.engine.optimizer.precision import LossScaler
from megatron_ext.parallel.comm import told
from megatron_ext.tasks.task import Tensors
from megatron_ext.timeline.progress import Wait

SCALE = Content("loss scale", (2,), torch.float16, True)
"""A number in fp32, bit by bit: so that it goes with the gradients, in one message."""


class StageScale:
    """That of this rank's stage. On a GPU, nothing of a pass makes the host wait."""

    def __init__(self, scaler: LossScaler, device: torch.device, groups: Sequence[Optional[dist.ProcessGroup]]) -> None:
        """`groups` together have all ranks of the stage."""
        self._scaler = scaler
        self._groups = groups
        self._device = device
        self._blamed = torch.zeros((), device=device)
        """Of the gradients since the last update that were not finite when they arrived, the largest scale with which a
        stage overflowed; 0 without any."""

    def entering(self, left: Tensors, received: Tensors) -> Tuple[Tensors, Tensor]:
        """The gradients with which the backward pass begins, from those received; and what is sent on as `SCALE`: the
        scale of this stage, or of the later one whose gradients are not finite."""
        own = torch.full((), self._scaler.scale, device=self._device)
        if SCALE.name not in received:
            return {LOSS: torch.full_like(left[LOSS], self._scaler.scale)}, _bits(own)
        sent = received[SCALE.name].clone().view(torch.float32)[0]
        gradients = {name: gradient for name, gradient in received.items() if name != SCALE.name}
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for gradient in gradients.values():
            finite = finite & torch.isfinite(gradient).all()
        self._blamed = torch.maximum(self._blamed, torch.where(finite, torch.zeros_like(sent), sent))
        scaled = {name: (gradient.float() * (own / sent)).to(gradient.dtype) for name, gradient in gradients.items()}
        return scaled, _bits(torch.where(finite, own, sent))

    def is_own_fault(self) -> bool:
        """Whether this stage's scale is to blame for the gradient of an update, which is not finite; all ranks of the
        stage ask."""
        for group in self._groups:
            if group is not None:
                with told("agreeing on whose loss scale was too large"):
                    dist.all_reduce(self._blamed, dist.ReduceOp.MAX, group)
        with Wait("reading whose loss scale was too large"):
            return self._scaler.scale >= float(self._blamed)

    def updated(self) -> None:
        """The gradients that come next are for another update."""
        self._blamed = torch.zeros_like(self._blamed)


def _bits(scale: Tensor) -> Tensor:
    return scale.reshape(1).view(torch.float16)
