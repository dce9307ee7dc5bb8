from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats

Numbers = NDArray[np.intc]

def ordered(lists: Sequence[Numbers], chunks: int) -> tuple[Numbers, int]: ...
def ends(
    actions: Numbers, slots: int, compute: Floats, send: Floats, start: Floats, busy: Floats, link: Numbers | None
) -> Floats: ...
def longest(
    actions: Numbers,
    slots: int,
    compute: Floats,
    send: Floats,
    start: Floats,
    busy: Floats,
    link: Numbers | None,
    after: Floats,
    shares: Floats,
) -> tuple[Floats, Floats, Floats, Floats, Floats]: ...
