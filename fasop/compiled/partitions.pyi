from fasop.costs.arrays import Floats, Integers

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
