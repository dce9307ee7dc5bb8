from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers

def mean_of(trip: Floats, fixed: Floats, layer: Floats, layers: Floats, tiny: float) -> Floats: ...
def mean_over_stages(own: Floats, own_layer: Floats, way: Floats, way_layer: Floats, layers: Floats) -> Floats: ...
def least_slopes(
    fixed: Floats, layer: Floats, hidden: Sequence[Floats], again: Integers, layers: int
) -> tuple[Floats, Floats]: ...
def whole_of(
    trip: Floats,
    fixed: Floats,
    layer: Floats,
    capacity: Integers,
    least: Floats,
    layers: int,
    levels: int,
    rounding: float,
) -> Floats: ...
def possible_steps(
    steps: NDArray[np.uint8],
    seconds: float,
    begin: Floats,
    update: Floats,
    there: Floats,
    trip: Floats,
    last: Floats,
    turned: Floats,
    summed: Floats,
) -> NDArray[np.uint8]: ...
