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
    return np.array([list(order) for order in _all(nodes)])


def searched(nodes: Sequence[int]) -> str:
    """In words, which orders `orders` gives."""
    number = count(nodes)
    if number <= MOST:
        return f"all {number} node orders" if number > 1 else "the one node order"
    return f"the {len(orders(nodes))} node orders that keep nodes of a group together, of about 10^{_digits(nodes) - 1}"


def _digits(nodes: Sequence[int]) -> int:
    """Of `count`, which may have more than Python writes out."""
    logarithm = math.lgamma(sum(nodes) + 1) - sum(math.lgamma(number + 1) for number in nodes)
    return int(logarithm / math.log(10)) + 1


def _all(nodes: Sequence[int]) -> Iterator[list[int]]:
    """Each order from the one before it: the last place that can take a larger kind takes the next larger one of those
    behind it, and those follow in ascending order (Knuth, The Art of Computer Programming 4A, algorithm L)."""
    order = [kind for kind, number in enumerate(nodes) for _ in range(number)]
    while True:
        yield order
        place = max((i for i in range(len(order) - 1) if order[i] < order[i + 1]), default=None)
        if place is None:
            return
        larger = max(i for i in range(place + 1, len(order)) if order[i] > order[place])
        order[place], order[larger] = order[larger], order[place]
        order = order[: place + 1] + order[:place:-1]
