from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers

Numbers = NDArray[np.intc]

def ordered(lists: Sequence[Numbers], chunks: int) -> tuple[Numbers, int]: ...
def ends(
    actions: Numbers, slots: int, compute: Floats, send: Floats, start: Floats, busy: Floats, link: Numbers | None
) -> Floats: ...

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
def rank_steps(
    lists: Sequence[Numbers], places: Numbers, tensors: Numbers, replicas: Numbers, micro_batches: int
) -> Numbers: ...
def column_ends(
    steps: Numbers,
    messages: int,
    compute: Floats,
    send: Floats,
    busy: Floats,
    start: Floats,
    row: Numbers,
    link: Numbers,
) -> Floats: ...
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
def mean_of(trip: Floats, fixed: Floats, layer: Floats, layers: Floats, tiny: float) -> Floats: ...
def mean_over_stages(own: Floats, own_layer: Floats, way: Floats, way_layer: Floats, layers: Floats) -> Floats: ...
def least_slopes(
    fixed: Floats, layer: Floats, hidden: Sequence[Floats], again: Integers, layers: int
) -> tuple[Floats, Floats]: ...
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
def least_sum(costs: Floats, memory: Floats, room: Floats, most: Floats) -> tuple[Integers, Floats]: ...
def filled(sums: Floats, limits: Floats, fixed: Floats, rounding: float) -> tuple[Integers, Integers, Floats]: ...
def least_largest(fixed: Floats, layer: Floats, capacity: Integers, layers: int) -> Integers: ...
def least_sums(
    fixed: Floats,
    layer: Floats,
    least: Integers,
    layers: int,
    micro_batches: int,
    lowest: Floats,
    rounding: float,
) -> Integers: ...
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
