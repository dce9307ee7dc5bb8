"""Dropout whose masks follow from what is masked alone, so that no layout, batch size or recomputation changes them.

Whether a number is dropped is a hash of the seed, the block, the sample's number and the place in its tensor. Every
rank works out the masks of what it holds, and a backward pass works them out again instead of keeping them.
"""

from __future__ import annotations

import zlib
from typing import Any, Tuple

import torch
from torch import Tensor
from torch.autograd import Function

LEVELS = 1 << 16
"""A rate is a multiple of a `LEVELS`-th: one 32-bit hash decides about two numbers."""
_LONG = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64 (Steele et al. 2014): the step between states, and the factors of its finalizer."""
_SHORT = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""The same for 32 bits; the factors are those of Wellons' lowbias32."""


def key_of(seed: int, name: str) -> int:
    """Of the place in the model whose name this is."""
    return (seed << 32) ^ zlib.crc32(name.encode())


def rows_of(key: int, *places: Tensor) -> Tensor:
    """A 64-bit hash for each row of a tensor, from its indices before the last dimension.

    `places` are int64 vectors: the samples' numbers, then the places of each further dimension in the whole tensor;
    or, with the shape of all dimensions so far, a place for each of them. Returns [the length of each].
    """
    found = torch.full((), _signed(key, 64), dtype=torch.int64, device=places[0].device)
    for place in places:
        found = _mixed(found.unsqueeze(-1) + place * _signed(_LONG[0], 64))
    return found


def dropout(x: Tensor, rate: float, rows: Tensor) -> Tensor:
    """x [..., columns] with a part of its numbers set to 0 and the others scaled; `rows` [...] is by `rows_of`."""
    y: Tensor = _Dropout.apply(x, rate, rows)  # type: ignore[no-untyped-call]
    return y


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, rows: Tensor) -> Tensor:
        ctx.rate = rate
        ctx.save_for_backward(rows)
        return _masked(x, rate, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _masked(gradient, ctx.rate, rows), None, None


def _masked(x: Tensor, rate: float, rows: Tensor) -> Tensor:
    dropped = round(rate * LEVELS)
    hashes = _hashes(rows, x.shape[-1])
    return (x * (LEVELS / (LEVELS - dropped))).masked_fill_(hashes < dropped - LEVELS // 2, 0.0)


def _hashes(rows: Tensor, columns: int) -> Tensor:
    """Evenly distributed numbers of 16 bits, [..., columns]: two from each hash of 32."""
    step, first, second = (_signed(number, 32) for number in _SHORT)
    column = torch.arange((columns + 1) // 2, device=rows.device) * step
    found = rows.int().unsqueeze(-1) + column.int()
    found ^= (found >> 16) & 0xFFFF
    found *= first
    found += (rows >> 32).int().unsqueeze(-1)
    found ^= (found >> 15) & 0x1FFFF
    found *= second
    found ^= (found >> 16) & 0xFFFF
    return found.view(torch.int16)[..., :columns]


def _mixed(state: Tensor) -> Tensor:
    """SplitMix64's finalizer."""
    _, first, second = (_signed(number, 64) for number in _LONG)
    state = (state ^ _shifted(state, 30)) * first
    state = (state ^ _shifted(state, 27)) * second
    return state ^ _shifted(state, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(number: int, bits: int) -> int:
    """The same bits as a number of two's complement."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> bits - 1 else number
