"""Passes that nothing comes of, before the first iteration: what works at its first call does it here."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.engine.executor.executor import LOSS, Chunk
from megatron_ext.tasks.stage import backward
from megatron_ext.tasks.task import Micro, Tensors


def pass_both(chunks: Sequence[Chunk], micro: Micro, loss: Callable[[Tensors, Micro], Tensor]) -> None:
    """A forward and a backward pass of each chunk, with zeros in the place of messages and gradients that are zero."""
    for chunk in chunks:
        left = _left(chunk, micro, with_gradients=True)
        if chunk.stage.last:
            left = {LOSS: loss(left, micro)}
        backward(left, {name: torch.zeros_like(tensor) for name, tensor in left.items()})


def pass_forward(chunks: Sequence[Chunk], micro: Micro) -> None:
    """A forward pass of each, as in an evaluation."""
    for chunk in chunks:
        _left(chunk, micro, with_gradients=False)


def _left(chunk: Chunk, micro: Micro, with_gradients: bool) -> Tensors:
    entered = chunk.entering.unpack([torch.zeros_like(like) for like in chunk.entering.likes])
    if with_gradients:
        for content in chunk.entering.contents:
            entered[content.name].requires_grad_(content.gradient)
    left: Tensors = chunk.stage({**entered, **{name: micro.inputs[name] for name in chunk.stage.inputs}})
    return left
