"""The best stages on contiguous ranks: each takes the ranks behind those of the stage before.

A stage with replicas on ranks [a, a + q) takes, for a mini-batch, a q-th of its operators' time on its slowest GPU and
of summing its gradients, or with `Sync.max` a q-th of the longer one. Stages work at the same time, so that the slowest
stage, or the busiest link, decides. Without a flush a stage with R - 1 - a ranks behind its first one holds
v = (R - 1 - a) // q + 1 mini-batches: as many versions of its weights, and as many times its activations. So memory is
known for each step of the recurrence

    F[cut, a, q] = min over earlier cuts and p of max(F[earlier, a - q, p], stage, link).

Exact: it is evaluated for all cuts that a division no slower than some limit may have. Work before a cut is at most
what the ranks before it do within the limit, and likewise behind it. The limit rises from a lower bound towards the
best division among the cuts of one order of the operators, until there is a division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers
from fasop.graphs.division import Options, Takes
from fasop.graphs.own.cuts import Allowance, Cuts, TooMany, Work, between, in_one_order
from fasop.graphs.own.machines import Machines
from fasop.graphs.own.versioned_memory import VersionedMemory

CLOSER = (1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Limits, as parts of the way from the lower bound to the best division that is known."""
STEPS = 2_000_000
"""Steps that listing the cuts for all limits may take."""
PAIRS = 300_000_000
"""Pairs of cuts that are looked at for one limit, at most, if each cut is one word."""
WORDS = 8
"""Words of a cut that take as long to compare as the times of a pair."""
BLOCK = 2**21
"""Pairs at a time."""
EQUAL = 1e-9
"""A part of the time that is not a difference."""
STAGE = 1e15
"""Fewer stages count more than fewer bytes."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stage."""

    groups: int
    """A mask."""
    begin: int
    """Its first rank."""
    replicas: int
    takes: Takes
    versions: int
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Best:
    seconds: float
    bound: float
    """No division takes less."""
    pieces: tuple[Piece, ...]


class Recurrence:
    """Divisions over all of some ranks."""

    def __init__(self, work: Work, machines: Machines, options: Options, held: VersionedMemory) -> None:
        self.work, self.machines, self.straight = work, machines, options.straight
        self._compression, self._sync, self.held = options.compression or 1.0, options.sync, held
        reference = work.compute_s[:, :1]
        known = reference[:, 0] > 0
        speed = [
            float((work.compute_s[known, kind] / reference[known, 0]).min()) if known.any() else 1.0
            for kind in range(work.compute_s.shape[1])
        ]
        self._does: Floats = np.concatenate([[0.0], np.cumsum([1 / speed[kind] for kind in machines.kinds])])
        """For each number of ranks from the first, seconds of work on the first kind of GPU that they do in a
        second."""

    def best(self) -> Best | None:
        """None: no division fits."""
        everything = float(self.work.compute_s[:, 0].sum())
        bound = everything / float(self._does[-1])
        ends = {0: Cuts(self.work, [0]), self.machines.count: Cuts(self.work, [self.work.all])}
        alone = self._alone_s()
        found = self._divide({**ends, **self._in_one_order(alone)}, alone)
        limits = [math.inf] if found is None else [bound + part * (found.seconds - bound) for part in CLOSER]
        steps = Allowance(STEPS)
        for limit in limits:
            try:
                layers = {**ends, **self._layers(limit, steps)}
            except TooMany:
                break
            closer = self._divide(layers, limit)
            if closer is not None:
                found, bound = closer, closer.seconds
                break
            bound = limit
        if found is None:
            return None
        return Best(seconds=found.seconds, bound=min(bound, found.seconds), pieces=found.pieces)

    def _alone_s(self) -> float:
        """Return the seconds of one stage on all ranks; infinite if it does not fit."""
        work, ranks = self.work, self.machines.count
        parameters, kept, fixed = (float(one.sum()) for one in (work.parameters, work.activations, work.fixed))
        memory = self.held.of(parameters, kept, fixed, 0.0, 1, first=True, last=True)
        if (ranks > 1 and self.straight) or memory > self.limit_bytes(0, ranks):
            return math.inf
        return float(self.stage_s(work.compute_s.sum(axis=0), np.array(parameters), 0, ranks)) * (1 + EQUAL)

    def _window(self, count: int, limit: float) -> tuple[float, float]:
        """Least and most seconds of work, on the first kind of GPU, before a cut behind so many ranks."""
        if not math.isfinite(limit):
            return -math.inf, math.inf
        everything, slack = float(self.work.compute_s[:, 0].sum()), limit * (1 + EQUAL)
        return everything - float(self._does[-1] - self._does[count]) * slack, float(self._does[count]) * slack

    def _in_one_order(self, limit: float) -> dict[int, Cuts]:
        if self.work.count == 1:
            return {}
        every, found = in_one_order(self.work), {}
        for count in range(1, self.machines.count):
            least, most = self._window(count, limit)
            which = np.flatnonzero((every.compute_s[:, 0] >= least) & (every.compute_s[:, 0] <= most))
            if which.size:
                found[count] = which
        while self._pairs(found) > PAIRS and max(map(len, found.values())) > 1:
            found = {count: which[::2] for count, which in found.items()}
        return {count: every.some(which) for count, which in found.items()}

    def _pairs(self, layers: Mapping[int, Cuts | NDArray[np.intp]]) -> int:
        """Count the pairs of cuts between which a stage may lie, in words."""
        replicas = 1 if self.straight else self.machines.count
        pairs = sum(len(a) * len(b) for x, a in layers.items() for y, b in layers.items() if 0 < y - x <= replicas)
        return pairs * -(-self.work.count // (64 * WORDS))

    def _layers(self, limit: float, steps: Allowance) -> dict[int, Cuts]:
        """Map each number of ranks before it to the cuts that a division within the limit may have."""
        layers = {}
        for count in range(1, self.machines.count):
            cuts = between(self.work, *self._window(count, limit), steps)
            if cuts:
                layers[count] = Cuts(self.work, cuts)
        if self._pairs(layers) > PAIRS:
            raise TooMany
        return layers

    def _divide(self, layers: Mapping[int, Cuts], limit: float) -> Best | None:
        """The fastest division with these cuts that takes no longer than the limit; of several, one with the fewest
        stages, and of these one that sends the fewest bytes."""
        fastest = _Pass(self, layers, limit, fewest=False).run()
        if fastest is None:
            return None
        seconds = fastest.seconds
        fewest = _Pass(self, layers, seconds * (1 + EQUAL), fewest=True).run()
        return Best(seconds=seconds, bound=0.0, pieces=(fewest or fastest).pieces)

    def versions(self, begin: int, replicas: int) -> int:
        return (self.machines.count - 1 - begin) // replicas + 1

    def stage_s(self, compute_s: Floats, parameters: Floats, begin: int, replicas: int) -> Floats:
        """`compute_s` [..., kinds] of the operators of a stage."""
        return self._sync.together(*self.parts_s(compute_s, parameters, begin, replicas))

    def parts_s(self, compute_s: Floats, parameters: Floats, begin: int, replicas: int) -> tuple[Floats, Floats]:
        """Return the seconds of computing a mini-batch, and of summing its gradients."""
        kinds = sorted(set(self.machines.kinds[begin : begin + replicas]))
        latency, rate = self.machines.summing(begin, replicas)
        slowest: Floats = compute_s[..., kinds].max(axis=-1)
        summing = (latency if replicas > 1 else 0.0) * (parameters > 0) + parameters * rate
        return slowest / replicas, summing / replicas

    def limit_bytes(self, begin: int, replicas: int) -> float:
        return float(self.machines.memory_bytes[begin : begin + replicas].min())

    def link_s(self, sent: Floats, cut: int, before: int, behind: int) -> Floats:
        return sent * (self.machines.sending(cut, before, behind) / self._compression)


class _Pass:
    """The recurrence once, for one aim: the least time, or within the limit the fewest stages and bytes."""

    def __init__(self, of: Recurrence, layers: Mapping[int, Cuts], limit: float, *, fewest: bool) -> None:
        self._of, self._layers, self._limit, self._fewest = of, layers, limit, fewest
        self._ranks = of.machines.count
        self._most = 1 if of.straight else self._ranks
        self._stages: dict[tuple[int, int], tuple[Floats, Integers]] = {}
        """For ranks up to a stage's last one and its replicas: the value, and the cut before it, of each cut."""
        self._ready: dict[tuple[int, int], tuple[Floats, Integers]] = {}
        """For ranks before a cut and replicas behind it: the value, and replicas before it, of each cut."""

    def run(self) -> Best | None:
        for replicas in range(1, self._most + 1):
            self._ready[0, replicas] = np.zeros(1), np.zeros(1, np.int64)
        for end in range(1, self._ranks + 1):
            if end not in self._layers:
                continue
            for replicas in range(1, min(self._most, end) + 1):
                if end - replicas in self._layers and np.isfinite(self._ready[end - replicas, replicas][0]).any():
                    self._stages[end, replicas] = self._stage(end, replicas)
            for behind in range(1, min(self._most, self._ranks - end) + 1):
                self._ready[end, behind] = self._cut(end, behind)
        last = [(float(self._stages[self._ranks, q][0][0]), q) for q in self._replicas(self._ranks)]
        value, replicas = min(last, default=(math.inf, 0))
        return self._found(replicas) if math.isfinite(value) else None

    def _replicas(self, end: int) -> list[int]:
        return [q for q in range(1, self._most + 1) if (end, q) in self._stages]

    def _cut(self, end: int, behind: int) -> tuple[Floats, Integers]:
        sent = self._layers[end].sent
        best, which = np.full(len(sent), math.inf), np.zeros(len(sent), np.int64)
        for before in self._replicas(end):
            value = self._stages[end, before][0]
            if not np.isfinite(value).any():
                continue
            link = self._of.link_s(sent, end, before, behind)
            value = value + sent if self._fewest else np.maximum(value, link)
            value = np.where(link <= self._limit, value, math.inf)
            which = np.where(value < best, before, which)
            best = np.minimum(best, value)
        return best, which

    def _stage(self, end: int, replicas: int) -> tuple[Floats, Integers]:
        begin = end - replicas
        before, behind, ready = self._layers[begin], self._layers[end], self._ready[begin, replicas][0]
        best, which = np.full(len(behind), math.inf), np.zeros(len(behind), np.int64)
        alive = np.flatnonzero(np.isfinite(ready))
        rows = max(1, BLOCK // max(1, len(behind)))
        for first in range(0, len(alive), rows):
            some = alive[first : first + rows]
            value = self._values(before, some, behind, begin, replicas, ready[some, np.newaxis])
            least = value.argmin(axis=0)
            values = value[least, np.arange(len(behind))]
            which = np.where(values < best, some[least], which)
            best = np.minimum(best, values)
        return best, which

    def _values(self, before: Cuts, some: Integers, behind: Cuts, begin: int, replicas: int, ready: Floats) -> Floats:
        """[some, behind]"""
        of = self._of
        inside = behind.working[np.newaxis, :] > before.working[some, np.newaxis]
        for word in range(before.words.shape[1]):
            inside &= (before.words[some, word, np.newaxis] & ~behind.words[np.newaxis, :, word]) == 0
        parameters = behind.parameters - before.parameters[some, np.newaxis]
        compute = behind.compute_s[np.newaxis] - before.compute_s[some, np.newaxis]
        seconds = of.stage_s(compute, parameters, begin, replicas)
        fits = inside & (seconds <= self._limit)
        if math.isfinite(bytes_ := of.limit_bytes(begin, replicas)):
            held = of.held.of(
                parameters,
                behind.activations - before.activations[some, np.newaxis],
                behind.fixed - before.fixed[some, np.newaxis],
                before.sent[some, np.newaxis],
                of.versions(begin, replicas),
                first=begin == 0,
                last=begin + replicas == self._ranks,
            )
            fits &= held <= bytes_
        value = ready + STAGE if self._fewest else np.maximum(ready, seconds)
        return np.where(fits, value, math.inf)

    def _found(self, replicas: int) -> Best:
        of, end, cut = self._of, self._ranks, 0
        pieces: list[Piece] = []
        slowest = 0.0
        while end:
            begin = end - replicas
            earlier = int(self._stages[end, replicas][1][cut])
            here, there = self._layers[begin], self._layers[end]
            parameters = there.parameters[cut] - here.parameters[earlier]
            versions = of.versions(begin, replicas)
            memory = of.held.of(
                parameters,
                there.activations[cut] - here.activations[earlier],
                there.fixed[cut] - here.fixed[earlier],
                here.sent[earlier],
                versions,
                first=begin == 0,
                last=end == self._ranks,
            )
            done = there.compute_s[cut] - here.compute_s[earlier]
            slowest = max(slowest, float(of.stage_s(done, parameters, begin, replicas)))
            computing, summing = of.parts_s(done, parameters, begin, replicas)
            received_s, fed_by = 0.0, 0
            if begin:
                fed_by = int(self._ready[begin, replicas][1][earlier])
                received_s = float(of.link_s(here.sent[earlier], begin, fed_by, replicas))
                slowest = max(slowest, received_s)
            pieces.append(
                Piece(
                    groups=there.masks[cut] & ~here.masks[earlier],
                    begin=begin,
                    replicas=replicas,
                    takes=Takes(compute_s=float(computing), summing_s=float(summing), received_s=received_s),
                    versions=versions,
                    memory_bytes=float(memory),
                )
            )
            end, cut, replicas = begin, earlier, fed_by
        return Best(seconds=slowest, bound=0.0, pieces=tuple(reversed(pieces)))


def fastest(
    work: Work, machines: Machines, counts: Sequence[int], options: Options, held: VersionedMemory
) -> Best | None:
    """The best division over the first ranks, as many as one of `counts`, which fall; as few as are as fast. None: none
    fits."""
    best = None
    for count in counts:
        found = Recurrence(work, machines.first(count), options, held).best()
        if found is None:
            continue
        if best is None or found.seconds <= best.seconds * (1 + EQUAL):
            best = found
    return best
