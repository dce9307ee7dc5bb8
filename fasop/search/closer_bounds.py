"""A closer bound of all plans of some spaces: the candidates that could be fastest are bounded by linear programs.

Work is counted, not timed, so that the same search says the same everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count

import numpy as np

from fasop.costs.training import Training
from fasop.partition.baselines import start
from fasop.partition.dominance import fingerprints
from fasop.partition.exact import proved
from fasop.partition.local_search import exhaustive, partition_count
from fasop.partition.possible_stages import PossibleStages
from fasop.search.bounds.order_bounds import OrderBounds, known
from fasop.search.bounds.whole_chains import WholeChains
from fasop.search.order_search import Bounded
from fasop.search.search import ShowProgress, no_progress
from fasop.search.space.candidates import Candidates, Space
from fasop.simulation.nodes import Nodes
from megatron_ext.contract.parallel_config import Recompute

PROOFS = ((0, 2), (25, 15), (100, 45), (400, 130))
"""Boxes in which a candidate is bounded, and the work that this is; where one of them is not enough, the next."""
PROGRAMS = 4
"""Linear programs of a unit of work, where layers differ."""
LITTLE, MUCH = 700, 2000
"""Work: one is about 0.01 CPU seconds."""
SIZES = 10
"""Sizes of a set of nodes that are bounded by a unit of work, where there was no time for it before."""
OF_ONE = 30
"""Orders that are built by a unit of work."""
LOOKS, STEPS, MOST_STEPS = 5, 16, 3000
"""Looks by `WholeChains` at a candidate or at all orders, steps of these in a unit of work, and in one look at most."""
STEP = 0.005
"""The part of `enough` by which the bound of a size rises at once: orders that are below it then are built."""
MOST_ORDERS = 3000
"""Orders of a size that are built, at most."""
OF_PASSES, SIMULATED = 500_000, (5_000_000, 30_000_000)
"""Passes that are simulated in a unit of work; and of all partitions of a candidate together, at most, before its first
proof and behind it."""
LAST = 1 + len(PROOFS)
"""The step of a candidate of which no more can be proved."""
PASSES = 2**12
"""Parts times micro-batches: of a candidate with more, simulations take too long."""


class _Size:
    """Sizes with a schedule, of which orders are built as they are needed."""

    def __init__(self, space: Space, number: int) -> None:
        self.space, self.number = space, number
        self._bounded: Sequence[Training] | None = None
        self._built = set[tuple[int, ...]]()
        self.work = 0
        """That was done since this was 0, beside orders that were built."""

    def closer(self, bound: float, enough: float) -> tuple[float, list[Nodes]]:
        """Return a better bound of all orders but those that are built, and the orders that are to be built for it. The
        same bound and no orders mean that nothing more is known."""
        self.work += 1
        if self.space.few:
            return enough, self.space.first
        if self._bounded is None:
            options = self.space.options(self.number)
            if not all(known(one, self.space.kinds) for one in options):
                return bound, []
            # To compute again takes no less.
            quickest = [one for one in options if one.parallel.recompute is Recompute.none]
            self._bounded = quickest or options
            every = OrderBounds(self._bounded, self.space.kinds, enough)
            return self._by_chains(self._bounded, every, max(every.least, bound), enough), []
        until = min(enough, bound + STEP * enough)
        bounds = OrderBounds(self._bounded, self.space.kinds, until)
        if bounds.least >= until:
            return until, []
        if not bounds.of_nodes:
            return (bound, []) if (every_order := self.space.every(MOST_ORDERS)) is None else (enough, every_order)
        if (found := bounds.orders(MOST_ORDERS)) is None:
            return bound, []
        new = [order for order in map(tuple, found.tolist()) if order not in self._built]
        self._built.update(new)
        return until, self.space.in_orders(np.array(new)) if new else []

    def _by_chains(self, options: Sequence[Training], every: OrderBounds, least: float, enough: float) -> float:
        """Raise `least`, below which no order of these options is, up to `enough`."""
        closer = enough
        for units in every.merged:
            chains = WholeChains.of_orders(options[0], every.most, units)
            if closer <= least or chains.steps > MOST_STEPS:
                return least
            closer, looks = chains.bound(least, closer, LOOKS)
            self.work += looks * (1 + chains.steps // STEPS)
        return closer


def closer_least(
    spaces: Sequence[Space], enough: float, most: int = MUCH, progress: ShowProgress = no_progress
) -> float:
    """Seconds below which no plan of these spaces is, at most `enough`, by so much work at most."""
    number, work = count(), 0
    heap: list[tuple[float, int, Space | _Size | Bounded, int]] = []
    seen = set[tuple[Hashable, ...]]()
    """Pipelines that were put on the heap: those on sets of nodes that differ in name alone are the same."""

    def put(bound: float, what: Space | _Size | Bounded, step: int = 0) -> None:
        if bound < enough:
            heapq.heappush(heap, (bound, next(number), what, step))

    def put_sizes(space: Space) -> int:
        raised = int((space.known < enough).sum())
        space.raise_known(lambda seconds: seconds < enough)
        for size, bound in enumerate(space.known.tolist()):
            put(bound, _Size(space, size))
        return raised

    for space in (space for space in spaces if space.least < enough):
        if space.is_bounded:
            put_sizes(space)
        else:
            put(space.floor, space)
    while heap and work < most:
        bound, _, what, step = heapq.heappop(heap)
        progress(work / most)
        if isinstance(what, Space):
            work += 1 + put_sizes(what) // SIZES
            continue
        if isinstance(what, _Size):
            closer, nodes = what.closer(bound, enough)
            if closer <= bound and not nodes and step:
                return bound
            work += what.work + sum(len(some.orders) for some in nodes) // OF_ONE
            what.work = 0
            for group in what.space.built(what.number, nodes):
                one = Bounded.of(group, bound)
                for column, numbers in enumerate(fingerprints(group.pipelines)):
                    if one.proved[column] < enough and numbers not in seen:
                        seen.add(numbers)
                        put(float(one.proved[column]), one.take(np.array([column])))
        elif not step:
            closer, looks = _by_whole_layers(what.group, bound, enough)
            work += looks
        elif step <= len(SIMULATED) and (passes := _passes_of_all(what.group)) <= SIMULATED[step - 1]:
            work += 1 + passes // OF_PASSES
            closer, step = max(bound, float(exhaustive(what.group.pipelines, what.group.layers)[1][0])), LAST
        elif step <= (len(PROOFS) if what.group.pipelines.order is None else 1) and _quick(what):
            lines, layers = what.group.pipelines, what.group.layers
            boxes, taken = PROOFS[step - 1]
            proof = proved(lines, layers, start(lines, layers, what.balanced), boxes, enough, bound)
            work += taken if lines.order is None else 1 + proof.boxes // PROGRAMS
            closer = max(bound, proof.bound)
            if 0 < proof.boxes < boxes:  # it has ended, and more of them prove no more
                step = len(PROOFS)
        else:
            return bound
        put(closer, what, step + 1)
    return heap[0][0] if heap else enough


def _quick(one: Bounded) -> bool:
    lines = one.group.pipelines
    return lines.parts_count * lines.micro_batches <= PASSES


def _passes_of_all(one: Candidates) -> int:
    """Count the passes of a simulation of all partitions, which says exactly how fast the best one is."""
    parts = one.pipelines.parts_count
    return partition_count(one.layers, parts) * parts * one.pipelines.micro_batches


def _by_whole_layers(one: Candidates, least: float, enough: float) -> tuple[float, int]:
    """Raise `least`, below which a candidate is not, up to `enough` by chains of whole layers; and count the looks. It
    takes no less than any of its replicas. Of replicas on unlike nodes `pipelines` has the slowest GPU of each stage,
    which none of them may have everywhere."""
    lines, looks = one.pipelines, 0
    if lines.schedule.definition.has_chunks:
        return least, 0
    if lines.order is not None:
        return PossibleStages.of(lines).least(least, enough), 1
    every = [
        replica.lines.take(np.array([column])) for replica in lines.replicas for column in range(len(replica.lines))
    ]
    for alone in every or [lines]:
        least, more = WholeChains.of_pipeline(alone, one.layers).bound(least, enough, LOOKS)
        looks += more
        if least >= enough:
            break
    return least, looks
