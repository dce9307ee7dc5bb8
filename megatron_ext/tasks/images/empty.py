"""Layers without weights: torch would draw some that are not used."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import skip_init


def empty_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=bias, device=_device())  # type: ignore[no-untyped-call]
    return layer


def empty_convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, bias: bool = True
) -> nn.Conv2d:
    layer: nn.Conv2d = skip_init(  # type: ignore[no-untyped-call]
        nn.Conv2d, inputs, outputs, kernel, stride, padding, bias=bias, device=_device()
    )
    return layer


def _device() -> torch.device:
    """The one that tensors are made on."""
    return torch.empty(0).device
