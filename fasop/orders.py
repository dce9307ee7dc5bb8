"""In which order the nodes of a cluster take their places: nodes of a kind are alike, so orders are multisets'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from fasop.placement import Integers

MOST = 5000
"""Orders of a cluster that are all searched; beyond, only those in which nodes of a kind are neighbours."""


def count(nodes: Sequence[int]) -> int:
    """Different orders of so many nodes of each kind."""
    return math.factorial(sum(nodes)) // math.prod(map(math.factorial, nodes))


def orders(nodes: Sequence[int], most: int = MOST) -> Integers:
    """[orders, nodes]: the kind of the node in each place, for so many nodes of each kind; in lexicographic order.

    All if there are no more than `most`, else those in which nodes of a kind are neighbours.
    """
    if count(nodes) > most:
        blocks = permutations([kind for kind, number in enumerate(nodes) if number])
        return np.array([[kind for kind in block for _ in range(nodes[kind])] for block in blocks])
    return np.array(list(_all(list(nodes))))


def searched(nodes: Sequence[int]) -> str:
    """In words, which orders `orders` gives."""
    number = count(nodes)
    if number <= MOST:
        return f"all {number} node orders" if number > 1 else "the one node order"
    return (
        f"the {len(orders(nodes))} node orders that keep nodes of a group together, of about 10^{len(str(number)) - 1}"
    )


def _all(left: list[int]) -> Iterator[list[int]]:
    if not any(left):
        yield []
    for kind, number in enumerate(left):
        if number:
            left[kind] -= 1
            for rest in _all(left):
                yield [kind, *rest]
            left[kind] += 1
