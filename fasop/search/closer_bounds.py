"""A closer bound of all plans of some spaces: the candidates that could be fastest are bounded by linear programs.

Work is counted, not timed, so that the same search says the same everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np

from fasop.partition.exact import proved
from fasop.search.order_search import Bounded, search_partitions
from fasop.search.search import ShowProgress, no_progress
from fasop.search.space.candidates import Space

WORK = 1000
"""Built sizes, and five for every candidate that is bounded by linear programs."""
PASSES = 2**11
"""Parts times micro-batches: of a candidate with more, simulations take too long."""


def closer_least(spaces: Sequence[Space], enough: float, progress: ShowProgress = no_progress) -> float:
    """Seconds below which no plan of these spaces is, at most `enough`. Of spaces with too many node orders to build
    them all, the bounds of their sizes stay as they are."""
    number = count()
    heap: list[tuple[float, int, Space | Bounded | None, int]] = [
        (bound, next(number), space, size)
        for space in spaces
        for size, bound in enumerate(space.bounds.tolist())
        if bound < enough
    ]
    heapq.heapify(heap)
    work = 0
    while heap and work < WORK:
        bound, _, what, size = heapq.heappop(heap)
        progress(work / WORK)
        if isinstance(what, Space) and what.few:
            work += 1
            for group in what.built(size, what.first):
                one = Bounded.of(group, bound)
                for column in np.nonzero(one.proved < enough)[0]:
                    some = one.take(np.array([column]))
                    heapq.heappush(heap, (float(some.proved[0]), next(number), some, 0))
        elif isinstance(what, Bounded) and _quick(what):
            work += 5
            partition, _ = search_partitions(what)
            closer = proved(what.group.pipelines, what.group.layers, partition, boxes=0).bound
            if closer < enough:
                heapq.heappush(heap, (max(bound, closer), next(number), None, 0))
        else:
            return bound
    return heap[0][0] if heap else enough


def _quick(one: Bounded) -> bool:
    lines = one.group.pipelines
    return lines.parts_count * lines.micro_batches <= PASSES
