"""Packs the runs of a sweep onto disjoint sets of a cluster's nodes so that the last one ends as early as possible.

Each run can train in several ways: on so many nodes of each group, in so much time. Small sweeps are solved exactly by
branch and bound over the moments at which runs start; an optimal packing exists in which each one starts at the
beginning or when another one ends. Larger sweeps keep the best list schedule, with a lower bound beside it: the work
that must be done, at the prices of nodes that make it largest (the dual of the relaxation without nodes' limits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

STEPS = 40_000
"""So many decisions a search takes at most, which is about 4 CPU seconds."""
TARGETS = 24
"""So many lengths of a packing are tried to find a list schedule."""
_SAME = 1e-9
"""Relative: moments that differ by less are one."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run can train."""

    nodes: tuple[int, ...]
    """The nodes of each group; at least one in all."""
    seconds: float
    traffic: float = 0.0
    """US dollars of what it sends between groups, which a packing by time ignores."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """When a run trains, and in which of its ways; seconds from the beginning."""

    way: Way
    start: float

    @property
    def end(self) -> float:
        return self.start + self.way.seconds


@dataclass(frozen=True, kw_only=True)
class Packing:
    """When each run trains, in the order of the runs."""

    slots: tuple[Slot, ...]
    bound: float
    """Proved: no packing of these ways ends earlier, in seconds."""

    @property
    def seconds(self) -> float:
        """When the last one ends."""
        return max(slot.end for slot in self.slots)


def pack(runs: Sequence[Sequence[Way]], nodes: Sequence[int], steps: int = STEPS) -> Packing:
    """Packs the runs.

    Args:
        runs: the ways of each; at least one run, and each with a way that fits the cluster.
        nodes: those of the cluster, by group.
        steps: decisions after which the search gives up proving.
    """
    fits = [[way for way in ways if all(n <= most for n, most in zip(way.nodes, nodes, strict=True))] for ways in runs]
    prices = _prices(fits, nodes)
    best = _by_lists(fits, nodes, prices)
    search = _Search(fits, nodes, prices, best, steps)
    search.run()
    found = search.best
    return replace(found, bound=found.seconds if search.complete else _bound(fits, prices, found.seconds))


def waits_for(packing: Packing, nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """The runs, by number, that must have ended before each one starts: all that have had one of its nodes before."""
    last_used: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())] * count for count in nodes]
    waits: list[tuple[int, ...]] = [()] * len(packing.slots)
    for run in in_order(packing):
        slot, before = packing.slots[run], set[int]()
        for of_group, wanted in zip(last_used, slot.way.nodes, strict=True):
            free = [number for number, (end, _) in enumerate(of_group) if end <= slot.start * (1 + _SAME) + _SAME]
            free.sort(key=lambda number: of_group[number][0], reverse=True)  # those that were used last
            for number in free[:wanted]:
                users = of_group[number][1]
                before.update(users)
                of_group[number] = (slot.end, (*users, run))
        waits[run] = tuple(sorted(before))
    return waits


def in_order(packing: Packing) -> list[int]:
    """The runs, by number, as they start."""
    return sorted(range(len(packing.slots)), key=lambda run: (packing.slots[run].start, run))


def _prices(runs: Sequence[Sequence[Way]], nodes: Sequence[int]) -> Floats:
    """Prices of a node of each group, of shape (prices, groups), at which the whole cluster costs 1 a second."""
    have = [group for group, count in enumerate(nodes) if count]
    parts = next(parts for parts in (12, 8, 6, 4, 3, 2, 1) if parts ** max(0, len(have) - 1) <= 200 or parts == 1)
    shares = [some for some in product(range(parts + 1), repeat=len(have)) if sum(some) == parts]
    if parts == 1:
        shares.append((1,) * len(have))
    prices = np.zeros((len(shares), len(nodes)))
    for row, some in enumerate(shares):
        for group, share in zip(have, some, strict=True):
            prices[row, group] = share / sum(some) / nodes[group]
    return prices


def _work(ways: Sequence[Way], prices: Floats, within: float = np.inf) -> Floats:
    """The least work of a run at each price, in seconds of the whole cluster, if it may take so long."""
    costs = [prices @ np.array(way.nodes) * way.seconds for way in ways if way.seconds <= within * (1 + _SAME)]
    return np.min(costs, axis=0) if costs else np.full(len(prices), np.inf)


def _bound(runs: Sequence[Sequence[Way]], prices: Floats, within: float = np.inf) -> float:
    """No packing ends earlier, if one can end `within` so many seconds."""
    longest = max(min(way.seconds for way in ways) for ways in runs)
    return min(within, max(longest, float(np.max(sum(_work(ways, prices, within) for ways in runs)))))


def _by_lists(runs: Sequence[Sequence[Way]], nodes: Sequence[int], prices: Floats) -> Packing:
    """The best of many list schedules: each run takes the way with the least work that ends within a target."""
    low = _bound(runs, prices)
    alone = [min(ways, key=lambda way: way.seconds) for ways in runs]
    best = _listed(alone, nodes)
    rows = sorted({0, len(prices) // 2, len(prices) - 1, int(np.argmax(sum(_work(ways, prices) for ways in runs)))})
    for target in np.linspace(low, best.seconds, TARGETS):
        for row in rows:
            chosen = [_cheapest(ways, prices[row], float(target)) for ways in runs]
            found = _listed(chosen, nodes)
            best = min(best, found, key=lambda packing: packing.seconds)
    return best


def _cheapest(ways: Sequence[Way], price: Floats, target: float) -> Way:
    within = [way for way in ways if way.seconds <= target] or [min(ways, key=lambda way: way.seconds)]
    return min(within, key=lambda way: (float(price @ np.array(way.nodes)) * way.seconds, way.seconds))


def _listed(chosen: Sequence[Way], nodes: Sequence[int]) -> Packing:
    """Whenever nodes are free, the longest run that fits them starts."""
    left = sorted(range(len(chosen)), key=lambda run: (-chosen[run].seconds, run))
    starts: dict[int, float] = {}
    busy: list[tuple[float, tuple[int, ...]]] = []
    free, now = list(nodes), 0.0
    while left:
        for run in [*left]:
            if all(n <= most for n, most in zip(chosen[run].nodes, free, strict=True)):
                free = [most - n for n, most in zip(chosen[run].nodes, free, strict=True)]
                starts[run] = now
                busy.append((now + chosen[run].seconds, chosen[run].nodes))
                left.remove(run)
        if left:
            busy.sort()
            now = busy[0][0]
            while busy and busy[0][0] <= now * (1 + _SAME):
                free = [most + n for n, most in zip(busy.pop(0)[1], free, strict=True)]
    slots = tuple(Slot(way=way, start=starts[run]) for run, way in enumerate(chosen))
    return Packing(slots=slots, bound=0.0)


class _Search:
    """Branch and bound; runs with the same ways are one kind, of which it does not matter which one comes first."""

    def __init__(
        self, runs: Sequence[Sequence[Way]], nodes: Sequence[int], prices: Floats, best: Packing, steps: int
    ) -> None:
        self.best = best
        self.complete = True
        self._runs: dict[tuple[Way, ...], list[int]] = {}
        for run, ways in enumerate(runs):
            self._runs.setdefault(tuple(ways), []).append(run)
        self._kinds = [*self._runs]
        self._nodes = tuple(nodes)
        self._prices = prices
        self._steps = steps
        self._options = [(kind, way) for kind, ways in enumerate(self._kinds) for way in ways]
        self._options.sort(key=lambda option: -option[1].seconds)
        self._costs = [prices @ np.array(way.nodes) for _, way in self._options]
        self._started: list[tuple[int, float]] = []
        """Options, and when they start."""
        self._seen: dict[object, float] = {}
        self._tighten()

    def run(self) -> None:
        left = tuple(len(self._runs[kind]) for kind in self._kinds)
        self._go(0.0, self._nodes, (), left, 0)

    def _tighten(self) -> None:
        """Counts only ways that can end before the best packing does."""
        until = self.best.seconds * (1 - _SAME)
        self._work = [_work(ways, self._prices, until) for ways in self._kinds]
        self._least = [min(way.seconds for way in ways) for ways in self._kinds]

    def _go(
        self, now: float, free: tuple[int, ...], busy: tuple[tuple[float, int], ...], left: tuple[int, ...], first: int
    ) -> None:
        """Decides what starts now, of the options from `first` on, and then goes on when the next run ends.

        `busy` are ends and options, the soonest first; `left` counts the runs of each kind that have not started.
        """
        if not any(left):
            self._keep(busy[-1][0])
            return
        self._steps -= 1
        if self._steps < 0:
            self.complete = False
            return
        if self._hopeless(now, busy, left) or self._known(now, busy, left, first):
            return
        for number in range(first, len(self._options)):
            kind, way = self._options[number]
            until = now + way.seconds
            if not left[kind] or until >= self.best.seconds * (1 - _SAME):
                continue
            if any(n > most for n, most in zip(way.nodes, free, strict=True)):
                continue
            self._started.append((number, now))
            self._go(
                now,
                tuple(most - n for n, most in zip(way.nodes, free, strict=True)),
                tuple(sorted((*busy, (until, number)))),
                tuple(count - (one == kind) for one, count in enumerate(left)),
                number,
            )
            self._started.pop()
        if busy:
            then = busy[0][0]
            ended = [number for end, number in busy if end <= then * (1 + _SAME)]
            given = [sum(self._options[number][1].nodes[group] for number in ended) for group in range(len(free))]
            now_free = tuple(most + n for most, n in zip(free, given, strict=True))
            self._go(then, now_free, busy[len(ended) :], left, 0)

    def _hopeless(self, now: float, busy: Sequence[tuple[float, int]], left: Sequence[int]) -> bool:
        """Whether nothing that can follow ends earlier than the best packing."""
        until = self.best.seconds * (1 - _SAME)
        waiting = [kind for kind, count in enumerate(left) if count]
        if now + max(self._least[kind] for kind in waiting) >= until:
            return True
        work = sum(left[kind] * self._work[kind] for kind in waiting)
        work = work + sum((end - now) * self._costs[number] for end, number in busy)
        return bool(now + np.max(work) >= until)

    def _known(self, now: float, busy: Sequence[tuple[float, int]], left: Sequence[int], first: int) -> bool:
        """Whether the same was reached before, and not later."""
        key = (left, first, tuple((round((end - now) / self.best.seconds, 9), number) for end, number in busy))
        before = self._seen.get(key, np.inf)
        self._seen[key] = min(now, before)
        return before <= now * (1 + _SAME)

    def _keep(self, end: float) -> None:
        waiting = {kind: list(self._runs[ways]) for kind, ways in enumerate(self._kinds)}
        found = {}
        for number, start in self._started:
            kind, way = self._options[number]
            found[waiting[kind].pop(0)] = Slot(way=way, start=start)
        slots = tuple(found[run] for run in range(len(found)))
        if max(slot.end for slot in slots) < self.best.seconds:
            self.best = replace(self.best, slots=slots)
            self._tighten()
