import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers

def chains_of_rows(
    rows: Integers,
    present: NDArray[np.uint8],
    size: Integers,
    first: Integers,
    replicas: Integers,
    last: Integers,
    even: NDArray[np.uint8],
    ahead: Integers,
    lag: Integers,
    left: Floats | None,
    forward: Floats,
    backward: Floats,
    embedding: Floats,
    head: Floats,
    count: int,
    share: float,
    far: float,
) -> Floats: ...
def shortest_trip(
    allowed: NDArray[np.uint8],
    seconds: float,
    step: Floats,
    there: Floats,
    back: Floats,
    there_and_back: Floats,
    summed: Floats,
    returned: Floats,
    pair: Floats,
    turned: Floats,
    crossed: Floats,
    trips: Floats,
    rounds: Floats,
) -> float: ...
def least_of(
    partitions: Integers,
    step: Floats,
    alone: Floats,
    there: Floats,
    there_and_back: Floats,
    summed: Floats,
    returned: Floats,
    left: Floats,
) -> Floats: ...
