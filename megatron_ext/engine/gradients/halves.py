"""The gradient of the even micro-batches beside that of the whole batch, in one iteration."""

from __future__ import annotations

from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.parallel.comm import all_reduce

AT_ONCE = 2**22
"""Numbers that are summed, or change places, together: few, for they take memory in fp64."""


class HalfGradients:
    """Of one rank. It takes as much memory as the gradients, from `keep` to the end of `compared`."""

    def __init__(
        self, flat: FlatWeights, elsewhere: Sequence[Tensor], model: Optional[dist.ProcessGroup], copies: int
    ) -> None:
        """`elsewhere` are parts of the flat gradients that another rank of the `model` group has, too, and counts; each
        weight is held by `copies` ranks of that group."""
        self._gradient = flat.grad
        self._kept = slice(0, flat.share.length)
        self._counted_elsewhere = [flat.share.of_gradient(part) for part in elsewhere]
        self._model = model
        self._copies = copies
        self._even: Optional[Tensor] = None

    def keep(self) -> None:
        """When the even micro-batches of this rank have added to the gradient, and no others."""
        self._even = self._gradient.clone()

    def compared(self, reduce: Callable[[], None]) -> Tuple[float, float, float]:
        """When the whole gradient was reduced: the squared norms of the even micro-batches' part and of the whole, and
        their dot product, over the whole model. `reduce` does with that part in the gradient's place what was done with
        the whole one.

        All ranks call it together; the gradient then is as it was.
        """
        assert self._even is not None
        whole, self._even = self._even, None  # it becomes the whole one's place for a while
        _swap(self._gradient, whole)
        reduce()
        even = self._gradient
        sums = torch.stack([self._dot(even, even), self._dot(whole, whole), self._dot(even, whole)])
        all_reduce(sums, self._model, "all-reduce of the products of gradients")
        _swap(self._gradient, whole)
        found: List[float] = (sums / self._copies).tolist()
        return found[0], found[1], found[2]

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        found = _dot(a[self._kept], b[self._kept])
        for part in self._counted_elsewhere:
            found = found - _dot(a[part], b[part])
        return found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in _pieces(a, b):
        total += x.double().dot(y.double())
    return total


def _swap(a: Tensor, b: Tensor) -> None:
    for x, y in _pieces(a, b):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)


def _pieces(a: Tensor, b: Tensor) -> Iterator[Tuple[Tensor, Tensor]]:
    yield from zip(torch.split(a, AT_ONCE), torch.split(b, AT_ONCE))
