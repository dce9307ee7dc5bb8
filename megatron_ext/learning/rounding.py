"""What `parallel.compress=int8` does to what crosses a cut, where no message is sent."""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import Tensor

from megatron_ext.engine.executor.int8 import quantised, restored
from megatron_ext.tasks.task import Task, Tensors


def over_cut(left: Tensors, task: Task) -> Tensors:
    """Returns what the next stage receives of what has left one; gradients are rounded on their way back.

    Tensors of one number format are rounded together, in their order, as they are sent.
    """
    known = task.wires
    together: Dict[torch.dtype, List[str]] = {}
    for name, tensor in left.items():
        if known[name].gradient and not known[name].exact:
            together.setdefault(tensor.dtype, []).append(name)
    found = dict(left)
    for names in together.values():
        flat: Tensor = _Rounded.apply(  # type: ignore[no-untyped-call]
            torch.cat([left[name].flatten() for name in names])
        )
        parts = torch.split(flat, [left[name].numel() for name in names])
        found.update((name, part.view(left[name].shape)) for name, part in zip(names, parts))
    return found


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return restored(quantised(numbers), numbers.numel(), numbers.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return restored(quantised(gradient), gradient.numel(), gradient.dtype)
