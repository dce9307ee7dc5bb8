"""The normalization layers of a transformer."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megatron_ext.contract.models.keys import RMS_NORM
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.parallel.tensor_parallel import TensorGroup

FUSED = hasattr(torch.ops.aten, "_fused_rms_norm")
"""Whether torch has a kernel for it on GPUs, since 2.9."""


class RMSNorm(nn.Module):
    """Root mean square normalization, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and FUSED:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return _RMSNorm.apply(x, self.weight, self.epsilon)  # type: ignore[no-untyped-call]


class _RMSNorm(Function):
    """Keeps only what comes in and one number a token: autograd's own way would keep three tensors more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normal = x.float() * inverse
        of_weight = (gradient * normal.to(x.dtype)).flatten(0, -2).sum(0)
        of_normal = (gradient * weight).float()
        of_x = inverse * (of_normal - normal * (of_normal * normal).mean(-1, keepdim=True))
        return of_x.to(x.dtype), of_weight, None


def norm(config: ModelConfig, width: Optional[int] = None) -> nn.Module:
    """A normalization layer of the model's kind, over so many numbers; None: over a token's vector."""
    width = config.hidden if width is None else width
    if config.normalization == RMS_NORM:
        return RMSNorm(width, config.norm_epsilon)
    return nn.LayerNorm(width, config.norm_epsilon)


class Norm(nn.Module):
    """The norm behind a stack whose result another one attends to."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.norm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)
