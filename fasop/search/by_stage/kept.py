"""Plans whose stages keep unlike shares of what they hold, or unlike things in their host's memory, or compute unlike
numbers of layers again: each as little on its GPUs as they need, and no less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.schema.values.partition import Partition
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.memory.amounts import GIB
from fasop.costs.parallelism import Parallelism
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.by_stage.bounds.chains import FAR
from fasop.search.by_stage.bounds.whole_layers import StageTables
from fasop.search.plan import Plan
from fasop.simulation.memory_of_stages import HeldOnKind, held_on_kinds
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.columns import ColumnReplay
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages, RankColumns
from megatron_ext.contract.parallel_config import SCATTERED, Offload, Recompute

Kept = tuple[int, Offload, Recompute]
"""What a stage keeps: a share of what a stage of ZeRO says, what in its host's memory, and what it computes again."""
SWEEPS = 2
"""How often all stages are gone through, at most: what one of them keeps changes little of what is best for another."""


def relieved(
    plan: Plan, until: float, *, shares: bool = True, offloads: bool = True, recomputes: bool = True
) -> Plan | None:
    """Return the plan of the same sizes whose stages share out, offload and compute again only what makes it faster or
    lets it fit; None if none is faster.

    Memory is each stage's own, so that what a stage may keep does not depend on the others. At first each stage takes
    what is fastest in all of them of what it has room for; from there, and from the plan on, one stage after another
    takes what makes an iteration shortest. Of the layers of a stage, the fewest that its memory needs are computed
    again; then layers move between stages as long as that is faster.

    Args:
        shares: whether stages may share out less than the plan says.
        offloads: whether they may offload less.
        recomputes: whether they may compute fewer layers again.
        until: CPU seconds of this process, from which on nothing new is begun.
    """
    parallel = plan.training.parallel
    if parallel.pipeline == 1 or not parallel.alike or parallel.stream is not None or time.process_time() > until:
        return None
    zero = parallel.zero if isinstance(parallel.zero, int) else int(parallel.sharded_optimizer)
    whole: Kept = zero, parallel.any_offload, parallel.recompute
    ways = [way for way in _lesser(whole) if (shares or way[0] == whole[0]) and (offloads or way[1] is whole[1])]
    fewer = _fewer(whole[2], max(plan.partition.layers)) if recomputes else [whole[2]]
    if len(ways) * len(fewer) == 1:
        return None
    fewest = {way: _fewest(plan, way, fewer) for way in ways}
    replay = None if parallel.schedule.definition.has_chunks else KeptReplay(plan)
    seconds = cache(replay.seconds if replay else lambda kept: predict_plan(_with(plan, kept)).iteration_s)
    if len(ways) > 1:  # it takes long to predict them
        ways.sort(key=lambda way: float(seconds((way,) * parallel.pipeline)))
    ways_of = [[one for way in ways if (one := fewest[way][stage])] for stage in range(parallel.pipeline)]
    best = tuple(next(iter(some), whole) for some in ways_of)
    # To compute fewer layers again takes no longer in any stage, so that there is nothing to choose where no more may.
    for begin in (best, (whole,) * parallel.pipeline) if len(ways) > 1 else ():
        found_here = begin
        for stage in (*range(parallel.pipeline),) * SWEEPS:
            for way in ways_of[stage]:
                kept = (*found_here[:stage], way, *found_here[stage + 1 :])
                if time.process_time() <= until and seconds(kept) < seconds(found_here):
                    found_here = kept
        best = min(best, found_here, key=seconds)
    found, table = _with(plan, best), None
    predicted = predict_plan(found)
    if not (parallel.schedule.definition.has_chunks or plan.training.shares_by_memory) and plan.training.blocks.alike:
        fewer = _fewer(whole[2], plan.training.blocks.layers) if recomputes else fewer
        table = _LayersTable.of(plan, best, fewer)
        # Stages that are full may keep as little as before, which gives them room for layers of others.
        full = (table.room <= plan.partition.layers).tolist()
        roomy = tuple(whole if is_full else kept for is_full, kept in zip(full, best, strict=True))
        for begin in dict.fromkeys((best, roomy)):
            of_begin = table if begin == best else _LayersTable.of(plan, begin, fewer)
            kept, moved = of_begin.moved(plan, begin, until)
            # What a stage takes at least is less than it takes where sums hide behind longer passes.
            if (then := predict_plan(moved)).iteration_s < predicted.iteration_s:
                best, found, predicted, table = kept, moved, then, of_begin
    if len({*best}) == 1 and best[0][2] is whole[2]:  # which the search has gone through with all its partitions
        return None
    floor = min(_of_work(plan), predicted.iteration_s)
    return replace(
        found,
        total=predicted.iteration_s,
        known_parts=predicted.parts,
        bound=floor if table is None else table.floor(floor, predicted.iteration_s),
        basis=predicted.basis,
        pipelines=None,
    )


def _lesser(whole: Kept) -> Iterator[Kept]:
    """Yield what a stage may keep instead, and that itself; a stage that shares nothing out has no ZeRO to have less
    of."""
    zero, offload, recompute = whole
    away = [
        one
        for one in Offload
        if one.takes_optimizer <= offload.takes_optimizer and one.takes_activations <= offload.takes_activations
    ]
    zeros = [*range(zero + 1)] if zero >= SCATTERED else [zero]
    yield from product(zeros, away, [recompute])


def _fewer(recompute: Recompute, layers: int) -> list[Recompute]:
    """List what may be computed again instead where some layers of a stage are, of which it has at most so many: from
    nothing to as much."""
    if recompute.way is not Recompute.full:
        return [recompute]
    most = min(recompute.layers or layers, layers)
    return [Recompute.none, *(Recompute(f"full:{number}") for number in range(1, most)), recompute]


def _fewest(plan: Plan, way: Kept, fewer: Sequence[Recompute]) -> list[Kept | None]:
    """List for each stage the same with the fewest layers computed again with which it has the memory; None where it
    never has."""
    found: list[Kept | None] = [None] * plan.training.parallel.pipeline
    for recompute in fewer:
        kept = (*way[:2], recompute)
        fits = _fits(_with(plan, (kept,) * len(found)))
        found = [kept if one is None and fit else one for one, fit in zip(found, fits, strict=True)]
        if None not in found:
            break
    return found


def _with(plan: Plan, kept: tuple[Kept, ...]) -> Plan:
    """The same plan, whose stages keep that."""
    zeros, offloads = tuple(zero for zero, _, _ in kept), tuple(offload for _, offload, _ in kept)
    zero: int | tuple[int, ...] | None = zeros
    if len({*zeros}) == 1:
        zero = zeros[0] if zeros[0] >= SCATTERED else None
    parallel = replace(
        plan.training.parallel,
        sharded_optimizer=max(zeros) > 0,
        zero=zero,
        offload=offloads if len({*offloads}) > 1 else offloads[0],
        recompute=Recompute("-".join(recompute for _, _, recompute in kept)),
    )
    return replace(plan, training=replace(plan.training, parallel=parallel))


def _fits(plan: Plan) -> list[bool]:
    """Whether each stage has the memory for what it keeps."""
    parallel = plan.training.parallel
    alike = [plan.training] * parallel.pipeline
    trainings = alike if parallel.alike else HeterogeneousStages(plan).trainings
    return [all(_has_room(one, one.layers) for one in kinds) for kinds in held_on_kinds(plan, trainings)]


def _has_room(held: HeldOnKind, layers: int) -> bool:
    return held.memory.of(layers) <= held.kind.gpu.memory_gib * GIB


def _of_work(plan: Plan) -> float:
    """Seconds below which no plan of these sizes is, whatever its stages keep."""
    parallel = plan.training.parallel
    training = replace(plan.training, parallel=replace(parallel, offload=Offload.none))
    kinds: dict[str, NodeKind] = {kind.name: kind for kind in plan.nodes}
    counts = {name: sum(node.name == name for node in plan.nodes) for name in kinds}
    used = [replace(kind, group=replace(kind.group, count=counts[name])) for name, kind in kinds.items()]
    return LowerBounds(used).of_work([training], [Recompute.none], used)


class KeptReplay:
    """How long an iteration of a plan takes whose stages have one chunk, by what they keep. What a stage takes does not
    depend on what others keep, so that it is worked out once for all stages that keep the same."""

    def __init__(self, plan: Plan) -> None:
        parallel = plan.training.parallel
        self._plan, self._layout = plan, parallel.layout
        self._replay = ColumnReplay(self._layout, str(parallel.schedule), parallel.micro_batches_of)
        self._known: dict[Kept, list[RankColumns]] = {}

    def seconds(self, kept: tuple[Kept, ...]) -> float:
        of_rank = [kept[self._layout.stage_dp_tp(rank)[0]] for rank in range(self._layout.world_size)]
        return float(self._replay.seconds([self._columns(way)[rank] for rank, way in enumerate(of_rank)])[0])

    def _columns(self, way: Kept) -> list[RankColumns]:
        """What each rank takes if all stages keep this, [1]."""
        if way not in self._known:
            stages = HeterogeneousStages(_with(self._plan, (way,) * self._layout.stages))
            self._known[way] = stages.columns(np.array([self._plan.partition.layers]).T)
        return self._known[way]


@dataclass(frozen=True, kw_only=True)
class _LayersTable:
    """What stages take with every number of layers, if each computes the fewest of them again that its memory needs."""

    parallel: Parallelism
    fewer: Sequence[Recompute]
    columns: list[RankColumns]
    """What each rank takes at least, [layers + 1]; `FAR` where so many layers never fit."""
    fewest: Integers
    """[stages, layers + 1]: the place in `fewer` of the first one that fits; their number where none does."""

    @classmethod
    def of(cls, plan: Plan, kept: Sequence[Kept], fewer: Sequence[Recompute]) -> _LayersTable:
        """The stages share out and offload what is `kept`."""
        parallel, numbers = plan.training.parallel, range(plan.training.blocks.layers + 1)
        layout, amounts = parallel.layout, np.tile(numbers, (parallel.pipeline, 1))
        found: dict[tuple[int, str], list[RankColumns]] = {}
        fewest = np.full(amounts.shape, len(fewer))
        for number, recompute in enumerate(fewer):
            one = _with(plan, tuple((*of_stage[:2], recompute) for of_stage in kept))
            stages = HeterogeneousStages(one)
            held = held_on_kinds(one, stages.trainings)
            fits = np.array([[all(_has_room(kind, n) for kind in kinds) for n in numbers] for kinds in held])
            fewest = np.where(fits, np.minimum(fewest, number), fewest)
            places = [(layout.stage_dp_tp(rank)[0], kind) for rank, kind in enumerate(stages.kinds)]
            for place, columns in dict(zip(places, stages.columns(amounts), strict=True)).items():
                found.setdefault(place, []).append(_where(fits[place[0]], columns))
        least = {place: _least(ways) for place, ways in found.items()}
        return cls(parallel=parallel, fewer=fewer, columns=[least[place] for place in places], fewest=fewest)

    @property
    def room(self) -> Integers:
        """[stages]: the most layers that fit."""
        numbers = np.arange(self.fewest.shape[1])
        return np.where(self.fewest < len(self.fewer), numbers, -1).max(axis=1)

    def floor(self, least: float, most: float) -> float:
        """Seconds, from `least` to `most`, below which no layers per stage are, proved."""
        counts = [self.parallel.micro_batches_of] * self.parallel.pipeline
        tables = StageTables.of(self.columns, self.parallel.schedule, self.parallel.layout, counts, self.room)
        return min(tables.least(least, most), most)

    def ways(self, layers: Sequence[int]) -> list[Recompute]:
        """List what stages of so many layers compute again, which fit."""
        return [self.fewer[number] for number in self.fewest[range(len(layers)), layers]]

    def moved(self, plan: Plan, kept: Sequence[Kept], until: float) -> tuple[tuple[Kept, ...], Plan]:
        """The plan with the best layers per stage that moving one after another leads to, and what its stages keep."""
        layers = self.shortest(plan.partition.layers, until)
        ways = tuple((*of_stage[:2], way) for of_stage, way in zip(kept, self.ways(layers), strict=True))
        training = replace(plan.training, parallel=replace(self.parallel, partition=layers))
        return ways, _with(replace(plan, training=training, partition=Partition(layers)), ways)

    def shortest(self, layers: Sequence[int], until: float) -> tuple[int, ...]:
        """The best layers per stage that moving one after another leads to."""
        layout = self.parallel.layout
        replay = ColumnReplay(layout, str(self.parallel.schedule), self.parallel.micro_batches_of)
        stage_of = [layout.stage_dp_tp(rank)[0] for rank in range(layout.world_size)]
        one = np.identity(layout.stages, np.int64)
        moves = (one[:, np.newaxis] - one).reshape(-1, layout.stages).T  # the first one moves nothing
        found = np.array(layers)[:, np.newaxis]
        while time.process_time() <= until:
            near = found + moves
            near = near[:, ((near >= 0) & (near <= self.room[:, np.newaxis])).all(axis=0)]
            taken = [_taken(of_rank, near[stage]) for of_rank, stage in zip(self.columns, stage_of, strict=True)]
            best = near[:, [np.argmin(replay.seconds(taken))]]
            if (best == found).all():
                break
            found = best
        return tuple(found[:, 0].tolist())


def _where(fits: NDArray[np.bool_], columns: RankColumns) -> RankColumns:
    return _each(columns, lambda name: np.where(fits, getattr(columns, name), FAR))


def _least(ways: Sequence[RankColumns]) -> RankColumns:
    return _each(ways[0], lambda name: np.min([getattr(way, name) for way in ways], axis=0))


def _taken(columns: RankColumns, numbers: Integers) -> RankColumns:
    """With such numbers of layers."""
    return _each(columns, lambda name: getattr(columns, name)[..., numbers])


def _each(columns: RankColumns, array: Callable[[str], Floats]) -> RankColumns:
    """The same with other arrays, by their names."""
    arrays: dict[str, Any] = {name: array(name) for name, part in vars(columns).items() if isinstance(part, np.ndarray)}
    return replace(columns, **arrays)
