"""In which order the nodes of a cluster take their places: nodes of a kind are alike, so orders are multisets'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, permutations

import numpy as np

from fasop.costs.arrays import Integers

MOST = 100
"""Orders that are all searched. Of more, a search begins with `starts` and goes on to `neighbours`."""
OF_LAYERS = 10_000
"""Orders times layers: of a small model so many more orders are all searched. There moving nodes is not a good guide,
since a stage may have all layers, and an order costs little.
"""
SHAPES, OF_SHAPES = 10, 1000
"""Likewise of orders of unlike sizes of nodes, which are looked at one by one."""
KINDS = 4
"""With more kinds than these not every sequence is a start."""
NODES = 24
"""With more nodes than these not every single one is moved everywhere."""
NEAR = 200
"""Neighbours of an order, at most."""


def magnitude(nodes: Sequence[int]) -> float:
    """The decimal logarithm of the number of different orders of so many nodes of each kind."""
    several = math.lgamma(sum(nodes) + 1) - sum(math.lgamma(number + 1) for number in nodes)
    return several / math.log(10)


def count(nodes: Sequence[int]) -> int:
    """Different orders of so many nodes of each kind."""
    return math.factorial(sum(nodes)) // math.prod(map(math.factorial, nodes))


def few(nodes: Sequence[int], layers: int | None = None) -> bool:
    """Whether all orders are searched: of a model of so many layers, or of any."""
    return at_most(nodes, MOST if layers is None else max(MOST, OF_LAYERS // layers))


def few_shapes(nodes: Sequence[int], layers: int) -> bool:
    """Whether all orders of the sizes of nodes are searched; `nodes` are so many of each size."""
    return at_most(nodes, max(SHAPES, OF_SHAPES // layers))


def at_most(nodes: Sequence[int], orders: int) -> bool:
    """Whether so many nodes of each kind have so many orders at most."""
    return magnitude(nodes) < math.log10(orders + 0.5)


def orders(nodes: Sequence[int]) -> Integers:
    """[orders, nodes]: the kind of the node in each place, for so many nodes of each kind; in lexicographic order."""
    return np.array([*_all([kind for kind, number in enumerate(nodes) for _ in range(number)])])


def _all(order: list[int]) -> Iterator[list[int]]:
    """From the first one: each is the last one with its last place that can grow as little larger as possible."""
    while True:
        yield [*order]
        falls = [place for place in range(len(order) - 1) if order[place] < order[place + 1]]
        if not falls:
            return
        place = falls[-1]
        other = max(behind for behind in range(place + 1, len(order)) if order[behind] > order[place])
        order[place], order[other] = order[other], order[place]
        order[place + 1 :] = reversed(order[place + 1 :])


def starts(nodes: Sequence[int]) -> Integers:
    """[orders, nodes]: where a search among orders begins; kinds with a lower number are faster.

    Those that keep nodes of a kind together, and those that have one kind at both ends and the others between. Of
    many kinds these are in a few sequences: the fastest first or last, and at both ends or in the middle.
    """
    kinds = [kind for kind, number in enumerate(nodes) if number]
    found = [[(kind, nodes[kind]) for kind in sequence] for sequence in _sequences(kinds)]
    for kind in kinds:
        others = [other for other in kinds if other != kind]
        for first in _parts(nodes[kind]) if others else ():
            for between in _sequences(others):
                runs = [(other, nodes[other]) for other in between]
                found.append([(kind, first), *runs, (kind, nodes[kind] - first)])
    return _distinct([kind for kind, number in runs for _ in range(number)] for runs in found)


def neighbours(order: Sequence[int]) -> Integers:
    """[orders, nodes]: an order's neighbours, without itself.

    Neighbouring nodes of a kind are a run. Two runs change places, or some nodes of a run go to another place: of many
    nodes one, half of them or all go between other runs, or into the middle of one.
    """
    order = [int(kind) for kind in order]
    bounds = [0, *(place for place in range(1, len(order)) if order[place] != order[place - 1]), len(order)]
    runs = [order[a:b] for a, b in pairwise(bounds)]
    middles = [(a + b) // 2 for a, b in pairwise(bounds)]
    places = range(len(order) + 1) if len(order) <= NODES else sorted({*bounds, *middles})
    found = []
    for first in range(len(runs)):
        for second in range(first + 1, len(runs)):
            swapped = [*runs]
            swapped[first], swapped[second] = runs[second], runs[first]
            found.append([*chain.from_iterable(swapped)])
    for begin, run in zip(bounds, runs, strict=False):
        for amount in sorted({len(run), max(1, len(run) // 2), 1}, reverse=True):
            left = order[:begin] + order[begin + amount :]
            for place in bounds if amount > 1 else places:
                at = min(place, len(left)) if place <= begin else max(begin, place - amount)
                found.append([*left[:at], *run[:amount], *left[at:]])
    every = _distinct(found)
    return every[(every != order).any(axis=1)][:NEAR]


def described(nodes: Sequence[int], layers: int) -> str:
    """In words, which orders of so many nodes of each kind are searched for a model of so many layers."""
    if few(nodes, layers):
        return f"all {count(nodes)} node orders" if count(nodes) > 1 else "the one node order"
    about = f"{count(nodes):,}" if magnitude(nodes) < 6 else f"about 10^{int(magnitude(nodes))}"
    return f"some of {about} node orders, found by moving nodes from {len(starts(nodes))} of them"


def _sequences(kinds: Sequence[int]) -> list[tuple[int, ...]]:
    if len(kinds) <= KINDS:
        return [*permutations(kinds)]
    ends = (*kinds[::2], *reversed(kinds[1::2]))
    middle = (*reversed(kinds[::2]), *kinds[1::2])
    return [tuple(kinds), tuple(reversed(kinds)), ends, middle]


def _parts(number: int) -> list[int]:
    """Numbers of nodes before the others, of which some stay for behind."""
    return sorted({1, number // 4, number // 2, number - number // 4, number - 1} & {*range(1, number)})


def _distinct(found: Iterable[Sequence[int]]) -> Integers:
    """In the same order."""
    return np.array([*dict.fromkeys(map(tuple, found))])
