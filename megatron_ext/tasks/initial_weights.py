"""Initial weights: normal numbers that follow from a parameter's name and the seed, whoever holds which part of it.

torch's generator takes one uniform number for each normal one, in their order, and turns 16 at a time into normal ones.
So a matrix can be drawn in pieces of 16 numbers or more. It cannot jump: the uniform numbers before a rank's share are
drawn and dropped, but nothing is made of them, no memory holds them, and what comes after the share is not drawn.
"""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional

import torch
from torch import Tensor

from megatron_ext.parallel.tensor_parallel import Shard

BLOCK = 16
"""Numbers that torch turns into normal ones at a time."""
PIECE = 2**18
"""Numbers in a piece, about: few enough to stay in memory just used."""


class Rows(NamedTuple):
    """Rows of a whole matrix that a share has, and where they begin in it."""

    first: int
    last: int
    begin: int


def draw(
    share: Tensor,
    whole: List[int],
    filled: int,
    shard: Optional[Shard],
    size: int,
    rank: int,
    std: float,
    generator: torch.Generator,
) -> None:
    """Fills the share of `rank` out of `size` of a matrix of the shape `whole`; rows from `filled` on are zero.

    The numbers are those that `torch.empty(filled, columns).normal_(0.0, std, generator=generator)` has there.
    """
    if share.is_meta:  # a model that is only looked at has shapes and no values
        return
    columns = whole[1]
    if filled * columns % BLOCK:  # torch then draws the last 16 numbers anew
        matrix = torch.zeros(whole, device=share.device)
        matrix[:filled] = torch.empty(filled, columns, device=share.device).normal_(0.0, std, generator=generator)
        share.copy_(matrix if shard is None else shard.part(matrix, size, rank))
        return
    held = _rows(whole[0], shard, size, rank)
    width = share.shape[1]
    left = rank * width if width < columns else 0
    for rows in held:
        share[rows.begin + max(0, min(rows.last, filled) - rows.first) : rows.begin + rows.last - rows.first].zero_()
    end = min(filled, held[-1].last)
    unit = BLOCK // math.gcd(columns, BLOCK)
    step = max(unit, PIECE // columns // unit * unit)
    scratch = torch.empty(step, columns, device=share.device)
    for first in range(0, end, step):
        last = min(first + step, filled)
        parts = [rows for rows in held if rows.first < last and rows.last > first]
        piece = scratch[: last - first]
        if not parts:
            piece.uniform_(generator=generator)
        elif width == columns and parts[0].first <= first and parts[0].last >= last:
            begin = parts[0].begin + first - parts[0].first
            share[begin : begin + last - first].normal_(0.0, std, generator=generator)
        else:
            piece.normal_(0.0, std, generator=generator)
            for rows in parts:
                low, high = max(first, rows.first), min(last, rows.last)
                begin = rows.begin + low - rows.first
                share[begin : begin + high - low] = piece[low - first : high - first, left : left + width]


def _rows(rows: int, shard: Optional[Shard], size: int, rank: int) -> List[Rows]:
    """List the rows by place in the whole matrix."""
    if shard is None or shard.dim == 1:
        return [Rows(0, rows, 0)]
    found, first, begin = [], 0, 0
    for length in shard.lengths(rows):
        own = length // size
        found.append(Rows(first + rank * own, first + (rank + 1) * own, begin))
        first, begin = first + length, begin + own
    return found
