import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats

Numbers = NDArray[np.intc]

class Replica:
    def __init__(
        self,
        actions: Numbers,
        slots: int,
        chunks: int,
        link: Numbers,
        one_way: NDArray[np.uint8],
        shares: Floats,
        table: Floats,
    ) -> None: ...
