"""Shares of a batch among unlike units of GPUs, exactly: none take less time.

A unit takes k micro-batches in t(k), where t is any function of k. The numbers k, one for every unit, are to add up to
the batch, and the largest t(k) is to be least. It is one of the values of t; a given time T is enough if sums of
numbers with t(k) <= T reach the batch, which bit sets answer: bit n stands for the sum n, and one more unit shifts the
set by each of its numbers. Halving the sorted values finds the least such T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from fasop.bits import bits
from fasop.costs.arrays import Floats, distinct


@dataclass(frozen=True)
class Units:
    """Units that are alike."""

    count: int
    seconds: Floats
    """Seconds of 0, 1, … micro-batches; infinite where there is no way to take so many, as for all that are not listed.
    No unit takes 0."""


@dataclass(frozen=True)
class Shares:
    """The least time, and what each unit takes."""

    seconds: float
    numbers: tuple[tuple[int, ...], ...]
    """Micro-batches of each unit, kind by kind."""


def least_time(kinds: Sequence[Units], total: int, at_most: float = inf) -> Shares | None:
    """The shares of `total` micro-batches that take least; None where none add up to it within `at_most` seconds."""
    every = np.concatenate([kind.seconds[1 : total + 1] for kind in kinds])
    values = distinct(every[np.isfinite(every) & (every <= at_most)])
    if not len(values) or not _enough(kinds, total, values[-1]):
        return None
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _enough(kinds, total, values[middle]):
            high = middle
        else:
            low = middle + 1
    seconds = float(values[low])
    return Shares(seconds, tuple(_divided(kinds, total, seconds)))


def _enough(kinds: Sequence[Units], total: int, seconds: float) -> bool:
    sets = [_within(kind, total, seconds) for kind in kinds]
    if not all(sets):
        return False
    counts = [kind.count for kind in kinds]
    least = sum(count * _lowest(of) for count, of in zip(counts, sets, strict=True))
    most = sum(count * (of.bit_length() - 1) for count, of in zip(counts, sets, strict=True))
    if not least <= total <= most:
        return False
    without_gaps = sum(count * _run(of) for count, of in zip(counts, sets, strict=True))
    return total <= without_gaps or bool(_sums_of_all(kinds, sets, total) >> total & 1)


def _sums_of_all(kinds: Sequence[Units], sets: Sequence[int], total: int) -> int:
    reached = 1
    for kind, numbers in zip(kinds, sets, strict=True):
        reached = _plus(reached, _times(numbers, kind.count, total), total)
    return reached


def _divided(kinds: Sequence[Units], total: int, seconds: float) -> Iterator[tuple[int, ...]]:
    """What each unit takes, no longer than `seconds`: of every kind about as much as it can within that time."""
    sets = [_within(kind, total, seconds) for kind in kinds]
    of_kinds = [_times(numbers, kind.count, total) for kind, numbers in zip(kinds, sets, strict=True)]
    of_rest = [1]
    for reached in reversed(of_kinds[1:]):
        of_rest.append(_plus(of_rest[-1], reached, total))
    most = [kind.count * (numbers.bit_length() - 1) for kind, numbers in zip(kinds, sets, strict=True)]
    left = total
    for kind, numbers, reached, rest, room in zip(
        kinds, sets, of_kinds, reversed(of_rest), _sums_from(most), strict=True
    ):
        wished = left * kind.count * (numbers.bit_length() - 1) / room
        taken = min(
            (n for n in bits(reached) if n <= left and rest >> (left - n) & 1), key=lambda n: (abs(n - wished), n)
        )
        yield _among_alike(numbers, kind.count, taken)
        left -= taken


def _among_alike(numbers: int, count: int, total: int) -> tuple[int, ...]:
    """`count` of the numbers that add up to the total, each as near the mean of the rest as can be; largest first."""
    reached = [1]
    for _ in range(count - 1):
        reached.append(_plus(reached[-1], numbers, total))
    taken, left = list[int](), total
    for rest in reversed(reached):
        units = count - len(taken)
        taken.append(
            min(
                (n for n in bits(numbers) if n <= left and rest >> (left - n) & 1),
                key=lambda n: (abs(n * units - left), n),
            )
        )
        left -= taken[-1]
    return tuple(sorted(taken, reverse=True))


def _within(kind: Units, total: int, seconds: float) -> int:
    """The numbers that a unit can take within a time, as a bit set."""
    possible = kind.seconds[: total + 1] <= seconds
    possible[0] = False
    return int.from_bytes(np.packbits(possible, bitorder="little").tobytes(), "little")


def _times(numbers: int, count: int, total: int) -> int:
    """The sums of so many of the numbers, up to a total."""
    reached, doubled = 1, numbers
    while count:
        if count & 1:
            reached = _plus(reached, doubled, total)
        count >>= 1
        if count:
            doubled = _plus(doubled, doubled, total)
    return reached


def _plus(some: int, others: int, total: int) -> int:
    """The sums of one number of each set, up to a total."""
    few, many = sorted((some, others), key=int.bit_count)
    reached = 0
    for number in bits(few):
        reached |= many << number
    return reached & ((1 << total + 1) - 1)


def _lowest(numbers: int) -> int:
    return (numbers & -numbers).bit_length() - 1


def _run(numbers: int) -> int:
    """How far 1, 2, 3, … are all there."""
    shifted = numbers >> 1
    return (~shifted & (shifted + 1)).bit_length() - 1


def _sums_from(values: Sequence[int]) -> list[int]:
    """Add up each value and all after it."""
    return [sum(values[first:]) for first in range(len(values))]
