"""Dropout whose masks follow from what is masked alone, so that no layout, batch size or recomputation changes them.

Whether a number is dropped is a hash of the seed, the block, the sample's number and the place in its tensor. Every
rank works out the masks of what it holds, and a backward pass works them out again instead of keeping them.
"""

from __future__ import annotations

import zlib
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_ext.parallel.fused import Fused

LEVELS = 1 << 16
"""A rate is a multiple of a `LEVELS`-th: one 32-bit hash decides about two numbers."""
_LONG = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants (Steele et al. 2014): the step between states, and the factors of its finalizer."""
_SHORT = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""The same for 32 bits; the factors are those of Wellons' lowbias32."""


def key_of(seed: int, name: str) -> Tensor:
    """Return the key of the place in the model whose name this is: an int64 in the CPU's memory. It is a tensor, since
    torch.compile would make a graph of its own for every Python number."""
    return torch.tensor(_signed((seed << 32) ^ zlib.crc32(name.encode()), 64), device="cpu")


def rows_of(key: Tensor, *places: Tensor) -> Tensor:
    """A 64-bit hash for each row of a tensor, from its indices before the last dimension.

    `places` are int64 vectors: the samples' numbers, then the places of each further dimension in the whole tensor;
    or, with the shape of all dimensions so far, a place for each of them. Returns [the length of each].
    """
    return _rows(places[0], key, *places[1:])


def dropout(x: Tensor, rate: float, rows: Tensor, onto: Optional[Tensor] = None) -> Tensor:
    """x [..., columns] with a part of its numbers set to 0 and the others scaled, added `onto` another tensor if there
    is one; `rows` [...] is by `rows_of`."""
    return _Dropout.apply(x, rate, rows, onto)  # type: ignore[no-untyped-call]


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, rows: Tensor, onto: Optional[Tensor]) -> Tensor:
        ctx.rate, ctx.adds = rate, onto is not None
        ctx.save_for_backward(rows)
        return _masked(x, rate, rows, onto)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None, None, Optional[Tensor]]:
        (rows,) = ctx.saved_tensors
        return _masked(gradient, ctx.rate, rows), None, None, gradient if ctx.adds else None


def _masked(x: Tensor, rate: float, rows: Tensor, onto: Optional[Tensor] = None) -> Tensor:
    if masked.fuses(x):
        return masked(x, rate, rows, onto)
    dropped = round(rate * LEVELS)
    hashes = _hashes(rows, x.shape[-1])
    left = (x * (LEVELS / (LEVELS - dropped))).masked_fill_(hashes < dropped - LEVELS // 2, 0.0)
    return left if onto is None else onto + left


@Fused
def masked(x: Tensor, rate: float, rows: Tensor, onto: Optional[Tensor] = None) -> Tensor:
    """What `dropout` gives, in operations that are one kernel: it works out a hash for each of its two columns."""
    dropped = round(rate * LEVELS)
    scale, least = LEVELS / (LEVELS - dropped), dropped - LEVELS // 2
    step, first, second = (_signed(number, 32) for number in _SHORT)
    column = torch.arange(x.shape[-1], device=rows.device)
    found = rows.int().unsqueeze(-1) + (column // 2 * step).int()
    found = (found ^ ((found >> 16) & 0xFFFF)) * first + (rows >> 32).int().unsqueeze(-1)
    found = (found ^ ((found >> 15) & 0x1FFFF)) * second
    found = found ^ ((found >> 16) & 0xFFFF)
    half = (found >> (column % 2 * 16).int()) & 0xFFFF
    left = torch.where(half - ((half & 0x8000) << 1) < least, 0.0, x * scale)
    return left if onto is None else onto + left


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


@Fused
def _rows(first: Tensor, key: Tensor, *others: Tensor) -> Tensor:
    step = _signed(_LONG[0], 64)
    found = _mixed(key + first * step)
    for place in others:
        found = _mixed(found.unsqueeze(-1) + place * step)
    return found


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
