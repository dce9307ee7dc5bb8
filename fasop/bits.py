"""Sets of small numbers as bit masks: number n is bit n."""

from __future__ import annotations

from collections.abc import Iterator


def bits(of: int) -> Iterator[int]:
    """The numbers in a mask, the smallest first."""
    while of:
        low = of & -of
        yield low.bit_length() - 1
        of ^= low


def mask(numbers: Iterator[int]) -> int:
    """The mask of some numbers."""
    found = 0
    for number in numbers:
        found |= 1 << number
    return found
