import numpy as np
from numpy.typing import NDArray

from fasop.compiled.replicas import Replica
from fasop.costs.arrays import Floats, Integers

class Climb:
    def __init__(
        self,
        replicas: list[Replica],
        first: Integers,
        members: Integers,
        capacity: Integers,
        shares: Floats,
        full: float,
    ) -> None: ...
    def move(self, partitions: Integers, seconds: Floats, columns: Integers) -> NDArray[np.bool_]: ...
