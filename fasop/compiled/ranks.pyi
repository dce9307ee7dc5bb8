from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats

Numbers = NDArray[np.intc]

def rank_steps(
    lists: Sequence[Numbers], places: Numbers, tensors: Numbers, replicas: Numbers, micro_batches: int
) -> Numbers: ...
def rank_ends(
    steps: Numbers,
    messages: int,
    compute: Floats,
    send: Floats,
    busy: Floats,
    start: Floats,
    row: Numbers,
    link: Numbers,
) -> Floats: ...
