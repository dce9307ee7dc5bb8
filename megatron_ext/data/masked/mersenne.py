"""The Mersenne Twisters of C++'s standard library, with which Megatron's compiled helper lays out samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, List

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 1 << 16
WORDS, MIDDLE = 312, 156
"""Of the state of 64 bits (Nishimura 2000)."""
_FACTOR = 6364136223846793005
_TWIST = np.uint64(0xB5026F5AA96619E9)
_HIGH, _LOW = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_ONE = np.uint64(1)


def random_32(seed: int) -> Iterator[NDArray[np.uint32]]:
    """The numbers of `std::mt19937(seed)`, block after block; numpy's generator is the same, and seeded alike."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield random.randint(0, 2**32, BLOCK, np.uint32)


def random_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """The numbers of `std::mt19937_64(seed)`, block after block."""
    words: List[int] = [seed % 2**64]
    for number in range(1, WORDS):
        words.append((_FACTOR * (words[-1] ^ (words[-1] >> 62)) + number) % 2**64)
    state = np.array(words, np.uint64)
    while True:
        _twist(state)
        yield _tempered(state)


def _twist(state: NDArray[np.uint64]) -> None:
    """The next words in place: each follows from itself, the one after it and the one half the state further."""
    for first in (0, MIDDLE):
        half, after = state[first : first + MIDDLE], state[first + 1 : first + MIDDLE + 1]
        # The last word's next one is the first of the new state, which is there by then.
        following = after if len(after) == MIDDLE else np.append(after, state[:1])
        mixed = (half & _HIGH) | (following & _LOW)
        other = state[MIDDLE - first : 2 * MIDDLE - first]
        half[:] = other ^ (mixed >> _ONE) ^ np.where(mixed & _ONE, _TWIST, np.uint64(0))


def _tempered(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    mixed ^= (mixed << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    mixed ^= (mixed << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    mixed ^= mixed >> np.uint64(43)
    return mixed
