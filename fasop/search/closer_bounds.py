"""A closer bound of all plans of some spaces: the candidates that could be fastest are bounded by linear programs.

Work is counted, not timed, so that the same search says the same everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np

from fasop.partition.baselines import start
from fasop.partition.exact import proved
from fasop.search.order_search import Bounded
from fasop.search.search import ShowProgress, no_progress
from fasop.search.space.candidates import Space

PROOFS = ((0, 5), (25, 15), (100, 45), (400, 130))
"""Boxes in which a candidate is bounded, and the work that this is; where one of them is not enough, the next."""
LITTLE, MUCH = 100, 2000
"""Work: a size that is built is 1 for orders with the same sizes of nodes. (One is about 0.01 CPU seconds.)"""
UNBOUNDED = -1
"""In place of a size: those of these nodes, for which there was no time, have no bounds of their own."""
SIZES = 10
"""Sizes of a set of nodes that are bounded by a unit of work."""
PASSES = 2**11
"""Parts times micro-batches: of a candidate with more, simulations take too long."""


def closer_least(
    spaces: Sequence[Space], enough: float, most: int = MUCH, progress: ShowProgress = no_progress
) -> float:
    """Seconds below which no plan of these spaces is, at most `enough`, by so much work at most. Of spaces with too
    many node orders to build them all, the bounds of their sizes stay as they are."""
    number = count()
    heap: list[tuple[float, int, Space | Bounded, int]] = [
        (bound, next(number), space, size)
        for space in spaces
        if space.least < enough
        for size, bound in (enumerate(_known(space, enough)) if space.is_bounded else [(UNBOUNDED, space.floor)])
        if bound < enough
    ]
    heapq.heapify(heap)
    work = 0
    while heap and work < most:
        bound, _, what, step = heapq.heappop(heap)
        progress(work / most)
        if isinstance(what, Space) and step == UNBOUNDED:
            work += 1 + len(what) // SIZES
            for size, of_size in enumerate(_known(what, enough)):
                if of_size < enough:
                    heapq.heappush(heap, (of_size, next(number), what, size))
        elif isinstance(what, Space) and what.few:
            work += len(what.first)
            for group in what.built(step, what.first):
                one = Bounded.of(group, bound)
                for column in np.nonzero(one.proved < enough)[0]:
                    some = one.take(np.array([column]))
                    heapq.heappush(heap, (float(some.proved[0]), next(number), some, 0))
        elif isinstance(what, Bounded) and step < len(PROOFS) and _quick(what):
            boxes, of_proof = PROOFS[step]
            work += of_proof
            lines, layers = what.group.pipelines, what.group.layers
            begin = start(lines, layers, what.balanced)
            closer = max(bound, proved(lines, layers, begin, boxes, enough).bound)
            if closer < enough:
                heapq.heappush(heap, (closer, next(number), what, step + 1))
        else:
            return bound
    return heap[0][0] if heap else enough


def _known(space: Space, enough: float) -> list[float]:
    space.raise_known(space.known < enough)
    found: list[float] = space.known.tolist()
    return found


def _quick(one: Bounded) -> bool:
    lines = one.group.pipelines
    return lines.parts_count * lines.micro_batches <= PASSES
