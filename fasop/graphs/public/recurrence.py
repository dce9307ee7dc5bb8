"""What PipeDream's public optimizer (optimizer_graph_hierarchical.py, SOSP 2019) answers, with its cost model.

Machines lie in levels, each of so many of the level below, which share a bandwidth. On a level a stage is a
set of operators between two states, and may have several replicas; its time for a mini-batch is its time on the level
below plus that of summing gradients, over its replicas, and no shorter than sending its activations takes. The
recurrence minimises the slowest stage. With `Sync.max` it is the paper's, which takes the longer of the two. What is
odd about the program is kept, so that the answers are the same:

- only stages that the recurrence puts last share the sum of gradients with the machines of the level below (`inner`);
- inside a level, a stage may begin behind a state that does not lie within the one where it ends;
- the memory rule holds ceil((machines - used) / replicas) copies, which is none for data parallelism;
- where several splits are as fast, it takes one at random; here the first in the order of states is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.errors import SearchError
from fasop.graphs.division import Level, Options, StageDivision, Sync, stages_of
from fasop.graphs.graph import Graph, Operators
from fasop.graphs.public.states import States


class Sets(Protocol):
    """Sets of operators between which stages lie, each after those that it contains; the last one has all."""

    @property
    def count(self) -> int: ...
    @property
    def compute_s(self) -> Floats: ...
    @property
    def activations(self) -> Floats: ...
    @property
    def parameters(self) -> Floats: ...
    @property
    def sent(self) -> Floats: ...
    def within(self, state: int) -> NDArray[np.intp]:
        """Those that a set contains, without itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stage."""

    first: int
    """The state where it begins: operators of the state before are not in it; 0: it is the first."""
    last: int
    """The state where it ends."""
    replicas: tuple[int, ...]
    """Replicas on each level, the outermost first."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    pipeline_s: float
    """Seconds of a mini-batch, in the steady state."""
    data_parallel_s: float
    single_s: float
    """On one machine."""
    segments: tuple[Segment, ...]

    @property
    def ends(self) -> list[int]:
        return [segment.last for segment in self.segments]


def optimize(states: Sets, levels: Sequence[Level], options: Options, *, strict: bool = False) -> Answer:
    """The public optimizer's answer; `levels` are in its order, the innermost first.

    With `strict` a stage begins behind a state that lies within the one where it ends: without, the public optimizer
    counts some divisions of branches that nobody can make, with too little time.

    Raises:
        SearchError: no division fits the memory, or the machines without replicas.
    """
    tables: list[_Table] = []
    compute, inner = _differences(states.compute_s), 1
    compute[np.tril_indices(states.count + 1, -1, states.count)] = math.inf  # it would end before it begins
    for end in range(states.count if strict else 0):
        apart = np.ones(states.count + 1, bool)
        apart[[0, *(states.within(end) + 1)]] = False
        compute[apart, end] = math.inf
    for level in levels:
        table = _Table(states, compute, level, inner, options, final=len(tables) == len(levels) - 1)
        tables.append(table)
        inner = level.machines
        compute = np.full_like(compute, math.inf)
        compute[: len(table.best)] = table.best[:, :, -1]
    seconds = float(tables[-1].best[0, -1, -1])
    if not math.isfinite(seconds):
        raise _nothing(levels, options, states.count)
    segments = [Segment(first=0, last=states.count - 1, replicas=())]
    for table in reversed(tables):
        segments = [
            Segment(first=first, last=last, replicas=(*whole.replicas, replicas))
            for whole in segments
            for first, last, replicas in table.split(whole.first, whole.last)
        ]
    total = float(states.compute_s[-1])
    return Answer(
        pipeline_s=seconds,
        data_parallel_s=data_parallel_s(total, float(states.parameters[-1]), levels, options.sync),
        single_s=total,
        segments=tuple(segments),
    )


def data_parallel_s(compute_s: float, parameter_bytes: float, levels: Sequence[Level], sync: Sync) -> float:
    """Return the seconds of a mini-batch where all machines have the whole graph; `levels` begin with the innermost
    one."""
    seconds, inner = compute_s, 1
    for level in levels:
        n = level.machines
        summing = 4 * (n - 1) * parameter_bytes / (level.bytes_per_s * n) / inner
        seconds = float(sync.together(seconds, summing)) / n
        inner = n
    return seconds


def _differences(totals: Floats) -> Floats:
    """[begin, end] of what lies behind state begin - 1 up to state end."""
    return totals - np.concatenate([[0.0], totals])[:, np.newaxis]


class _Table:
    """The best times on one level."""

    def __init__(
        self, states: Sets, compute: Floats, level: Level, inner: int, options: Options, *, final: bool
    ) -> None:
        """`compute` [begin, end] are times on the level below, which has `inner` machines; only the `final` level asks
        for nothing but divisions of the whole."""
        self._states, self._compute, self._level, self._options = states, compute, level, options
        rows = 1 if final else states.count
        replicas = 1 + np.arange(level.machines)
        self._whole = np.full((rows, states.count, level.machines), math.inf)
        """[begin, end, machines - 1] as one stage with so many replicas."""
        parameters = _differences(states.parameters)[:rows]
        kept = _differences(states.activations)[:rows] + parameters
        for number in replicas[: 1 if options.straight else None]:
            summing = 4 * (number - 1) * parameters / (level.bytes_per_s * number) / inner
            seconds = options.sync.together(compute[:rows], summing) / number
            copies = math.ceil((level.machines - number) / number)
            self._whole[:, :, number - 1] = self._fitting(seconds, copies * kept)
        self.best: Floats = self._whole.copy()
        """[begin, end, machines - 1] in the fastest way."""
        for end in range(states.count):
            self._fill(end)

    def _fitting(self, seconds: Floats, held: Floats) -> Floats:
        """Infinite where more bytes are held than a machine has."""
        limit = self._options.memory_bytes
        return seconds if limit is None else np.where(held > limit, math.inf, seconds)

    def _fill(self, end: int) -> None:
        """Divisions that end with a state, once those of all states within it are known."""
        cuts = self._states.within(end)
        rows = min(end, len(self.best))
        best, before = self.best[:rows, end], self.best[:rows][:, cuts]
        for number in range(1, self._most_replicas + 1) if before.size else ():
            last = self._last(cuts, end, number)[np.newaxis, :, :]
            slowest = np.maximum(before[:, :, : self._level.machines - number], last)
            np.minimum(best[:, number:], slowest.min(axis=1), out=best[:, number:])
        if self._options.fewer:
            np.minimum.accumulate(best, axis=1, out=best)

    @property
    def _most_replicas(self) -> int:
        """Return the most replicas of the last of several stages."""
        return min(1 if self._options.straight else self._level.machines, self._level.machines - 1)

    def _last(self, cuts: NDArray[np.intp], end: int, number: int) -> Floats:
        """[cuts, machines of all stages before - 1]: seconds of a last stage with `number` replicas."""
        states, level, options = self._states, self._level, self._options
        parameters = states.parameters[end] - states.parameters[cuts]
        summing = 4 * (number - 1) * parameters / (level.bytes_per_s * number)
        seconds: Floats = options.sync.together(self._compute[cuts + 1, end], summing) / number
        if options.compression is not None:
            rate = level.bytes_per_s * number * options.compression
            seconds = np.maximum(seconds, 2 * states.sent[cuts] / rate)
            if end < states.count - 1:
                seconds = np.maximum(seconds, 2 * states.sent[end] / rate)
        seconds = np.repeat(seconds[:, np.newaxis], level.machines - number, axis=1)
        if options.memory_bytes is not None:
            kept = states.activations[end] - states.activations[cuts] + parameters
            used = np.arange(number + 1, level.machines + 1)
            held = np.ceil((level.machines - used) / number) * kept[:, np.newaxis]
            seconds = self._fitting(seconds, held)
        return seconds

    def split(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """First state, last state and replicas of each stage of the fastest division on all machines."""
        found, machines = list[tuple[int, int, int]](), self._level.machines
        while True:
            seconds = self.best[begin, end, machines - 1]
            if seconds == self._whole[begin, end, machines - 1]:
                return [(begin, end, machines), *found]
            if self._options.fewer and machines > 1 and seconds == self.best[begin, end, machines - 2]:
                machines -= 1
                continue
            cuts = self._states.within(end)
            cut, number = min(
                (int(cuts[place]), number)
                for number in range(1, min(self._most_replicas, machines - 1) + 1)
                for place in np.flatnonzero(
                    seconds
                    == np.maximum(
                        self.best[begin, cuts, machines - number - 1],
                        self._last(cuts, end, number)[:, machines - number - 1],
                    )
                )
            )
            found.insert(0, (cut + 1, end, number))
            end, machines = cut, machines - number


def _nothing(levels: Sequence[Level], options: Options, states: int) -> SearchError:
    if options.memory_bytes is not None:
        return SearchError(
            f"memory_gb={options.memory_bytes / 1e9:g}: by the public rule no division of the graph fits; give more "
            f"memory, or leave memory_gb out"
        )
    machines = "x".join(str(level.machines) for level in levels)
    return SearchError(
        f"straight=true: the graph has {states} states, too few for a stage on each of {machines} machines; give fewer "
        "machines, or add fewer=true"
    )


def divide(graph: Graph, levels: Sequence[Level], options: Options) -> StageDivision:
    """Divide a graph as the public tool's `-o` writes it. Raises SearchError: there is none, or too many states to look
    at."""
    operators = Operators(graph)
    states = States(operators)
    answer = optimize(states, levels, options)
    placed = states.stages(answer.ends)
    left = [node.name for node, stage in zip(operators.nodes, placed, strict=True) if stage is None]
    notes = []
    if left:
        notes.append(
            f"the public optimizer considers only what depends on {operators.nodes[states.first].name}: it gives "
            f"{', '.join(left[:3])}{', ...' * (len(left) > 3)} no stage and ignores their time"
        )
    return StageDivision(
        stages=stages_of(operators, placed, [segment.replicas for segment in answer.segments]),
        graph=operators.annotated(placed),
        pipeline_s=answer.pipeline_s,
        data_parallel_s=answer.data_parallel_s,
        single_s=answer.single_s,
        notes=tuple(notes),
    )
