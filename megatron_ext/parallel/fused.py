"""Functions of tensors that become one kernel on a GPU, whether or not the model's blocks are compiled."""

from __future__ import annotations

from functools import lru_cache, update_wrapper
from typing import Any, Callable, Generic, Optional, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Fused(Generic[T]):
    """Calls a function of tensors, on a GPU as torch.compile fuses it: each intermediate result would be a kernel and a
    pass over memory of its own. On a CPU, and within a graph that is being compiled, it calls the function itself."""

    def __init__(self, function: Callable[..., T]) -> None:
        update_wrapper(self, function)
        self.plain = function
        self._compiled: Optional[Callable[..., T]] = None

    def __call__(self, first: Tensor, *others: Any) -> T:
        if first.is_meta:
            return self._as_one_kernel(first, *others)
        if compiling() or not self.fuses(first):
            return self.plain(first, *others)
        if self._compiled is None:
            self._compiled = torch.compile(self.plain)
        return self._compiled(first, *others)

    def _as_one_kernel(self, *taken: Any) -> T:
        """Calls the function where memory is counted on the device meta: not what a kernel has within itself."""
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return self.plain(*taken)

    @staticmethod
    def fuses(first: Tensor) -> bool:
        """Whether a call with this tensor is one kernel, by itself or within a graph that is being compiled."""
        return first.is_cuda and (compiling() or fuses(first.device))


def compiling() -> bool:
    """Whether torch.compile is looking at what is called now."""
    there = getattr(torch.compiler, "is_compiling", None) if hasattr(torch, "compiler") else None
    return bool(there()) if there is not None else False


@lru_cache(maxsize=None)
def fuses(device: torch.device) -> bool:
    """Whether torch.compile makes kernels for this GPU: it needs Triton, a C compiler and a recent GPU, and can be
    switched off (TORCH_COMPILE_DISABLE=1). It is tried, for nothing tells; what it lacks is printed once. The device
    meta stands for a GPU that has all this."""
    if device.type == "meta":
        return True
    if device.type != "cuda" or not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return False
    from torch._dynamo import config

    if getattr(config, "disable", False):
        return False
    try:
        torch.compile(_twice)(torch.zeros(2, device=device))
    except Exception as error:  # noqa: BLE001  (compilers raise errors of many kinds)
        first = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"torch.compile cannot make kernels here ({first}): the loss and dropout launch more of them", flush=True)
        return False
    return True


def _twice(x: Tensor) -> Tensor:
    return x * 2.0
