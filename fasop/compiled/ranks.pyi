from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers

Numbers = NDArray[np.intc]

def rank_steps(
    lists: Sequence[Numbers], places: Numbers, tensors: Numbers, replicas: Numbers, micro_batches: int
) -> Numbers: ...
def rank_seconds(
    steps: Numbers,
    messages: int,
    compute: Floats,
    send: Floats,
    busy: Floats,
    ends: Floats,
    embedding: float,
    stage: Numbers,
    row: Numbers,
    link: Numbers,
    layers: Integers,
) -> Floats: ...
