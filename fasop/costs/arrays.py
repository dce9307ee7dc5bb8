"""Arrays of numbers: what costs, simulations and searches take and give for many plans at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Sorted, each once; a few numbers in half the time of `np.unique`, which also first imports the masked arrays that
    it does not take, unless it counts."""
    return _each_once(np.sort(values, axis=None))


def _each_once(ordered: NDArray[Any]) -> NDArray[Any]:
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def distinct_rows(rows: Integers) -> Integers:
    """The rows, of numbers from 0 to 2**32 - 1, sorted, each once: compared as bytes, with the highest first, in a
    third to a seventh of the time of `np.unique`."""
    packed = rows.astype(">u4", order="C")
    whole = np.sort(packed.view(np.dtype((np.void, packed.itemsize * rows.shape[1]))).reshape(-1))
    return _each_once(whole).view(packed.dtype).reshape(-1, rows.shape[1]).astype(np.int64)


def rolled(values: NDArray[Any], by: int, axis: int) -> NDArray[Any]:
    """The rows (axis 0) or columns (axis 1) so many places on, as `np.roll` gives them in five times the time."""
    parts = (values[-by:], values[:-by]) if axis == 0 else (values[:, -by:], values[:, :-by])
    return np.concatenate(parts, axis=axis)
