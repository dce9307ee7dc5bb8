"""Arrays of numbers: what costs, simulations and searches take and give for many plans at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


def distinct(values: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
    """Sorted, each once. `np.unique` does that too, but first imports the masked arrays that it does not take."""
    return np.asarray(np.unique(values, return_counts=True, axis=axis)[0])
