"""How far below the fastest plan any of some candidates could be: that with the lowest bound is bounded more closely,
until all bounds are near enough, or so much was done. A better partition that is found on the way counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from fasop.costs.arrays import Integers
from fasop.search.by_stage.candidate import Candidate

BOXES = (0, 25, 100, 400)
"""In which a candidate is bounded by its longest paths, each time that it is the lowest once more."""
PROBED = 2
"""Proofs that are made if only the lowest bound is of a candidate: they may come upon better partitions."""
IN_VAIN = 250_000
"""`Effort.in_vain` of a search."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is looked at."""

    layouts: int
    """At most, on one set of nodes."""
    work: int
    """Steps of replays."""
    gpus: int
    """In a cluster of more GPUs nothing is looked at."""
    near: float
    """The part of the best plan's time up to which bounds are raised with much work."""
    raised: int
    """How many candidates are built for their bounds alone, at most."""
    proofs: int
    """How often candidates are bounded by their longest paths, at most."""
    patience: int
    """How many layouts near fast plans are searched until one is faster, at most."""
    in_vain: int
    """Steps of replays that are tried until one is faster, at least: of few stages that is more layouts."""

    @property
    def proves(self) -> bool:
        """Whether bounds are raised up to the best plan."""
        return self.near == 1.0


QUICK = Effort(layouts=2500, work=400_000, gpus=256, near=0.953, raised=150, proofs=16, patience=20, in_vain=IN_VAIN)
WHOLE = Effort(layouts=40_000, work=2_500_000, gpus=1024, near=1.0, raised=600, proofs=60, patience=60, in_vain=IN_VAIN)


@dataclass(frozen=True, kw_only=True)
class _Open:
    """A candidate whose bound may be raised."""

    build: Callable[[], Candidate] | None = None
    """Where there is no `one` yet."""
    one: Candidate | None = None
    partition: Integers | None = None
    """One that fits, if it is known."""
    steps: int = 0
    """What was done already: its tables, and boxes."""


class Closing:
    """Candidates, those with the lowest bounds first."""

    def __init__(self, fastest: float, effort: Effort) -> None:
        self.fastest = fastest
        """Seconds of the best plan."""
        self.best: list[tuple[Candidate, Integers]] = []
        """The candidates that take so long, with their partitions: none if the best plan is none of them."""
        self._effort, self._number = effort, count()
        self._heap: list[tuple[float, int, _Open]] = []
        self._built = self._proofs = 0

    def put_off(self, bound: float, build: Callable[[], Candidate]) -> None:
        """Take a candidate that is only built if its bound is too low."""
        self._push(bound, _Open(build=build))

    def keep(self, one: Candidate, partition: Integers, seconds: float) -> None:
        """Keep a candidate that is one of the fastest, once."""
        if math.isfinite(seconds) and seconds <= self.fastest and all(one is not other for other, _ in self.best):
            self.best = [*(self.best if seconds == self.fastest else ()), (one, partition)]
            self.fastest = seconds

    def add(self, one: Candidate, partition: Integers, seconds: float) -> None:
        """Take a candidate with the best partition that was found; infinite seconds if it does not fit."""
        self.keep(one, partition, seconds)
        if one.exhausted:
            self._push(seconds, _Open())
        else:
            self._push(one.bound, _Open(one=one, partition=partition if math.isfinite(seconds) else None))

    def _push(self, bound: float, what: _Open) -> None:
        heappush(self._heap, (bound, next(self._number), what))

    def run(self, until: float) -> float:
        """Seconds below which no candidate is; infinite if there is none. Nothing is begun after so many CPU seconds of
        this process."""
        while self._heap and self._heap[0][0] < self.fastest and time.process_time() <= until:
            if not self._closer(*self._heap[0]):
                break
        return self._heap[0][0] if self._heap else math.inf

    def tighten(self, until: float) -> None:
        """Raise the bounds of the fastest candidates as far as those of others, and that of the first one, which comes
        before others of the same time then, farther. No proof is begun after so many CPU seconds of this process."""
        for number, (one, partition) in enumerate([*self.best]):
            one.tighten(self.fastest)
            for boxes in BOXES if number == 0 and one.alike and self._effort.proves else ():
                if one.bound < self.fastest and time.process_time() <= until:
                    self.keep(one, *one.prove(partition, boxes, self.fastest))

    def _closer(self, bound: float, _: int, what: _Open) -> bool:
        """Bound the first one more closely; whether there is a way that is worth it."""
        effort, far, one = self._effort, bound < self._effort.near * self.fastest, what.one
        if one is None:
            if what.build is None or not far or self._built == effort.raised:
                return False
            self._built += 1
            one, partition, steps = what.build(), None, 0
        elif what.steps == 0:
            one.tighten(self.fastest)
            partition, steps = what.partition, 1
            if one.few and one.bound < self.fastest:  # to try them all is less work than to prove anything
                partition, seconds, _ = one.search(self.fastest)
                self.keep(one, partition, seconds)
                one.bound = max(one.bound, seconds)
        else:
            number = what.steps - 1
            if (
                number == len(BOXES)
                or not (far or self._proofs < PROBED)
                or self._proofs == effort.proofs
                or not one.alike
            ):
                return False
            self._proofs += 1
            partition = one.search(self.fastest)[0] if what.partition is None else what.partition
            partition, seconds = one.prove(partition, BOXES[number], self.fastest)
            if seconds < self.fastest:
                self.best, self.fastest = [(one, partition)], seconds
            steps = what.steps + 1
        heappop(self._heap)
        self._push(max(bound, one.bound), _Open(one=one, partition=partition, steps=steps))
        return True
