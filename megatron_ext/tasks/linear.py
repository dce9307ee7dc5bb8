"""Layers whose weight gradient is not autograd's: it is added where it belongs, and can be computed later.

Zero-bubble schedules split the backward pass: the part that the previous stage waits for comes first, and the
weight gradients fill time in which the rank would wait (Qi et al. 2023).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Hashable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


class WeightGradients:
    """Keeps the weight gradients' computations of one rank until they are asked for."""

    def __init__(
        self,
        add: Callable[[nn.Parameter, Tensor, Tensor], None],
        add_rows: Optional[Callable[[nn.Parameter, Tensor, Tensor], None]] = None,
    ) -> None:
        """`add` takes a parameter and two matrices, of which the product is one micro-batch's gradient of it.

        `add_rows` takes a table, the numbers of rows [n] that were looked up in it, and their gradients [n, width];
        without it, autograd adds them.
        """
        self._add = add
        self.add_rows = add_rows
        self._waiting: Dict[Hashable, List[Tuple[nn.Parameter, Tensor, Tensor]]] = {}
        self._key: Optional[Hashable] = None

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Backward passes in this block leave the weight gradients of linear layers to `run(key)`."""
        self._key = key
        self._waiting[key] = []
        try:
            yield
        finally:
            self._key = None

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Computes what was left under `key`."""
        for weight, x, gradient in self._waiting.pop(key):
            self._add(weight, gradient.t(), x)

    def take(self, weight: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        """Computes a weight gradient, now or later; x [rows, in], gradient [rows, out]."""
        if self._key is None:
            self._add(weight, gradient.t(), x)
        else:
            self._waiting[self._key].append((weight, x, gradient))


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], later: Optional[WeightGradients]) -> Tensor:
    """`x @ weight.T + bias`; with `later`, the weight's gradient is left to it."""
    if later is None:
        return F.linear(x, weight, bias)
    assert isinstance(weight, nn.Parameter)
    if not x.requires_grad and torch.is_grad_enabled():  # autograd would keep nothing, for it does not see the weight
        x = x.detach().requires_grad_()
    return _Linear.apply(x, weight.detach(), bias, partial(later.take, weight))  # type: ignore[no-untyped-call]


def embedding(rows: Tensor, table: Tensor, later: Optional[WeightGradients]) -> Tensor:
    """The rows of a table with these numbers; with `later`, only their gradients are added, never one of all rows."""
    if later is None or later.add_rows is None or table.is_cuda or not torch.is_grad_enabled():
        return F.embedding(rows, table)  # on a GPU, to find out which rows are distinct would make the host wait
    assert isinstance(table, nn.Parameter)
    followed = torch.empty(0, requires_grad=True)  # autograd would keep nothing, for it does not see the table
    return _Embedding.apply(followed, rows, table.detach(), partial(later.add_rows, table))  # type: ignore[no-untyped-call]


class _Linear(Function):
    """Autograd sees the weight only detached: a gradient of None would still count as one that has arrived."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], take: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.take = take
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None, Optional[Tensor], None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        ctx.take(x.flatten(0, -2), rows)
        return gradient @ weight, None, rows.sum(0) if ctx.has_bias else None, None


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, followed: Tensor, rows: Tensor, table: Tensor, add: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.rows = rows
        ctx.add = add
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[None, None, None, None]:
        ctx.add(ctx.rows.flatten(), gradient.flatten(0, -2))
        return None, None, None, None
