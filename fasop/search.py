"""The best plans for a cluster: degrees, micro-batch, node order and partition.

Bounds decide what need not be looked at: a plan is left out only if it is proved that none of its partitions beats the
plans that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conf.partition import NodeOrder, Partition
from conf.schema import Parallel, Recompute, Schedule
from fasop.baselines import amp, even, minmax
from fasop.bounds import passes_bound, quick_bound
from fasop.candidates import Candidates, Space
from fasop.costs import Basis
from fasop.fast import Floats
from fasop.hardware import NodeKind
from fasop.partition import bottleneck, shortest
from fasop.pipelines import Parts, Pipelines
from fasop.placement import Integers
from fasop.progress import Told, nobody
from fasop.training import Training

BATCH = 32
"""Candidates of which partitions are searched together; what they give may leave out the next ones."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan, and what is predicted of it; times are seconds."""

    training: Training
    """Its `parallel` has partition and node order."""
    nodes: Sequence[NodeKind]
    """In their order."""
    total: float
    """An iteration, once the first one is over."""
    parts: Parts
    """Where the time goes; arrays of one."""
    bound: float
    """Proved: no partition of these sizes and nodes that fits takes less."""
    basis: Basis
    pipelines: Pipelines
    """What its stages take; one pipeline."""

    @property
    def parallel(self) -> Parallel:
        return self.training.parallel

    @property
    def gap(self) -> float:
        """How much less than `total` another partition could take at most, as a part of it."""
        return 1 - self.bound / self.total


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a search has gone through."""

    candidates: int
    """Sizes, options and node orders that differ and fit into memory."""
    too_large: int
    """How many do not fit with any partition."""
    searched: int
    """Those of which partitions were searched; the bounds left out the others."""


@dataclass(frozen=True, kw_only=True)
class Result(Seen):
    plans: Sequence[Plan]
    """The best first; equal ones in the order of `by_time`."""


class Keep(Protocol):
    """The plans that a search is after."""

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        """Whether plans on all these nodes that take so many seconds would be kept, by what is kept so far.

        If not, none that takes longer would be.
        """
        ...

    def add(self, plans: Sequence[Plan]) -> None: ...


class Best:
    """So many plans that take the shortest time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.plans: list[Plan] = []

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        slowest = self.plans[-1].total if len(self.plans) == self._most else np.inf
        return np.asarray(bounds <= slowest)

    def add(self, plans: Sequence[Plan]) -> None:
        self.plans = sorted([*self.plans, *plans], key=by_time)[: self._most]


def by_time(plan: Plan) -> tuple[float, tuple[object, ...]]:
    """Orders plans; of equally fast ones first those that use less of everything that makes a plan complicated."""
    p = plan.parallel
    options = (list(Recompute).index(p.recompute), p.sharded_optimizer, p.sequence_parallel)
    schedule = (list(Schedule).index(p.schedule), p.chunks)
    sizes = (p.world_size, p.tensor, p.data, p.pipeline, p.micro_batch_size)
    return plan.total, (*options, *schedule, *sizes, p.node_order, p.partition)


def search(space: Space, most: int) -> Result:
    """The `most` best plans of the candidates of `space`."""
    best = Best(most)
    seen = explore([space], best)
    return found(best.plans, seen)


def found(plans: Sequence[Plan], seen: Seen) -> Result:
    return Result(plans=plans, candidates=seen.candidates, too_large=seen.too_large, searched=seen.searched)


def explore(spaces: Iterable[Space], keep: Keep, count: int = 1, told: Told = nobody) -> Seen:
    """Hands every plan to `keep` that it may want.

    The spaces, `count` of them, are taken one after another, so that no more than one need be in memory.
    """
    candidates = too_large = searched = 0
    for number, space in enumerate(spaces):
        for done, more in enumerate(_explored(space, keep)):
            searched += more
            told((number + (done + 1) / len(space.groups)) / count)
        candidates += space.candidates
        too_large += space.too_large
    return Seen(candidates=candidates, too_large=too_large, searched=searched)


def _explored(space: Space, keep: Keep) -> Iterator[int]:
    """For each group, the most promising first: of how many candidates the partitions were searched."""
    groups = space.groups
    loose = [passes_bound(group.pipelines, group.layers) for group in groups]
    by_bound = sorted(range(len(groups)), key=lambda i: (loose[i].min(), i))
    leads = _leads(groups, loose, by_bound, keep)
    for number in [*leads, *(i for i in by_bound if i not in leads)]:
        group = groups[number]
        if keep.worth(group.kinds, loose[number]).any():
            yield _searched(group, leads.get(number) or _bounded(group), keep)
        else:
            yield 0


@dataclass(frozen=True, kw_only=True)
class _Bounded:
    """What is known of a group before any partition of it is searched."""

    balanced: Integers
    """The partitions from `bottleneck`."""
    proved: Floats
    """The bounds."""


def _bounded(group: Candidates) -> _Bounded:
    balanced = bottleneck(group.pipelines, group.layers)
    return _Bounded(balanced=balanced, proved=quick_bound(group.pipelines, group.layers, balanced))


def _leads(
    groups: Sequence[Candidates], loose: Sequence[Floats], by_bound: Sequence[int], keep: Keep
) -> dict[int, _Bounded]:
    """The groups that may have the best plan of all, those first of which the balanced partition is fastest.

    A good plan that is found early leaves out most others. The lowest bounds do not tell of it: pipelines of few stages
    have low ones that they are far from. Of a group only the candidate with the lowest bound is simulated.
    """
    seconds: dict[int, float] = {}
    known: dict[int, _Bounded] = {}
    fastest = np.inf
    for number in by_bound:
        group = groups[number]
        if loose[number].min() > fastest:
            break
        if not keep.worth(group.kinds, loose[number]).any():
            continue
        known[number] = _bounded(group)
        first = np.array([np.argmin(known[number].proved)])
        if known[number].proved[first[0]] <= fastest:
            seconds[number] = float(group.pipelines.take(first).iteration(known[number].balanced[:, first])[0])
            fastest = min(fastest, seconds[number])
    return {number: known[number] for number in sorted(known, key=lambda i: seconds.get(i, np.inf))}


def _searched(group: Candidates, known: _Bounded, keep: Keep) -> int:
    proved = known.proved
    promising, searched = np.argsort(proved, kind="stable"), 0
    for begin in range(0, len(promising), BATCH):
        batch = promising[begin : begin + BATCH]
        batch = batch[keep.worth(group.kinds, proved[batch])]
        if not len(batch):
            break
        chosen = group.take(batch)
        begun = start(chosen.pipelines, chosen.layers, known.balanced[:, batch])
        partitions, seconds = shortest(chosen.pipelines, chosen.layers, begun)
        kept = np.nonzero(keep.worth(group.kinds, seconds))[0]
        if len(kept):
            keep.add(_plans(chosen.take(kept), partitions[:, kept], proved[batch[kept]]))
        searched += len(batch)
    return searched


def start(pipelines: Pipelines, layers: int, balanced: Integers) -> Integers:
    """Where the search for partitions begins: the best of what others do, if it fits, and the smallest largest stage.

    So the partition that is found is never worse than theirs.
    """
    ways = (balanced, minmax(pipelines, layers), even(pipelines, layers), amp(pipelines, layers))
    every, together = np.arange(len(pipelines)), np.tile(np.arange(len(pipelines)), len(ways))
    partitions, lines = np.concatenate(ways, axis=1), pipelines.take(together)
    seconds = np.where(lines.fits(partitions), lines.iteration(partitions), np.inf).reshape(len(ways), -1)
    best: Integers = np.stack(ways)[np.argmin(seconds, axis=0), :, every].T
    return best


def _plans(group: Candidates, partitions: Integers, proved: Floats) -> list[Plan]:
    parts = group.pipelines.parts(partitions)
    plans = []
    for column, order in enumerate(group.orders):
        nodes = [group.kinds[kind] for kind in order]
        parallel = replace(
            group.training.parallel,
            partition=str(Partition(tuple(partitions[:, column].tolist()))),
            node_order=str(NodeOrder(tuple(kind.name for kind in nodes))),
        )
        plans.append(
            Plan(
                training=replace(group.training, parallel=parallel),
                nodes=nodes,
                total=float(parts.total[column]),
                parts=parts.of(column),
                bound=float(proved[column]),
                basis=Basis(int(group.pipelines.basis[column])),
                pipelines=group.pipelines.take(np.array([column])),
            )
        )
    return plans
