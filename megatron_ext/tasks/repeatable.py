"""What is computed again in the backward pass instead of kept, and blocks that draw random numbers from torch: the same
in every layout, and again where they are computed again."""

from __future__ import annotations

import threading
import zlib
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

_DRAWING = threading.RLock()
"""A device has one generator for all threads, of which each may run a copy of the model (`parallel.streams`)."""


def passed(function: Callable[..., T], again: bool, *taken: Optional[Tensor]) -> T:
    """`function(*taken)`; with `again`, computed once more in the backward pass instead of kept."""
    if not again:
        return function(*taken)
    return checkpoint(function, *taken, use_reentrant=False, preserve_rng_state=False)


def repeatable(module: nn.Module, name: str, seed: Optional[int], recompute: bool) -> nn.Module:
    """A block whose forward pass draws the same numbers in every layout, and is done again if asked for.

    Without a `seed` it draws none. What it draws follows from its attribute `first`, the number of the micro-batch's
    first sample.
    """
    module.first = 0  # type: ignore[assignment]
    run = Runs(module, module.forward, name, seed, recompute)
    module.forward = lambda *taken: run(int(module.first), taken)  # type: ignore[arg-type]
    return module


class Runs:
    """Forward passes of a block."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], name: str, seed: Optional[int], recompute: bool
    ) -> None:
        self._block = block
        self._forward = forward
        self._name = name
        self._seed = seed
        self._recompute = recompute

    def __call__(self, sample: int, taken: Tuple[Tensor, ...]) -> Any:
        if not self._recompute:
            return self._once(sample, taken)
        done = False

        def run(*taken: Tensor) -> Any:
            nonlocal done
            if not done:
                done = True
                return self._once(sample, taken)
            return self._again(sample, taken)

        return passed(run, True, *taken)

    def _once(self, sample: int, taken: Tuple[Tensor, ...]) -> Any:
        if self._seed is None:
            return self._forward(*taken)
        with _seeded(zlib.crc32(f"{sample}.{self._name}".encode(), self._seed), taken):
            return self._forward(*taken)

    def _again(self, sample: int, taken: Tuple[Tensor, ...]) -> Any:
        """For the backward pass: it must not count twice in running statistics."""
        before = {name: buffer.clone() for name, buffer in self._block.named_buffers()}
        try:
            return self._once(sample, taken)
        finally:
            for name, buffer in self._block.named_buffers():
                buffer.data.copy_(before[name])  # not a change that autograd would see


@contextmanager
def _seeded(seed: int, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Random numbers of the block's own; afterwards all goes on as if none had been drawn."""
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with _DRAWING, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
