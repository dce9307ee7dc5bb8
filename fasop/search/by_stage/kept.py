"""Plans whose stages keep unlike shares of what they hold, or unlike things in their host's memory, or compute unlike
numbers of layers again: each as little on its GPUs as they need, and no less."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from fasop.costs.hardware import NodeKind
from fasop.costs.memory.amounts import GIB
from fasop.search.lower_bound import LowerBounds
from fasop.search.plan import Plan
from fasop.simulation.memory_of_stages import HeldOnKind, held_on_kinds
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages
from megatron_ext.contract.parallel_config import SCATTERED, Offload, Recompute

Kept = tuple[int, Offload, Recompute]
"""What a stage keeps: a share of what a stage of ZeRO says, what in its host's memory, and what it computes again."""
SWEEPS = 2
"""How often all stages are gone through, at most: what one of them keeps changes little of what is best for another."""


def relieved(
    plan: Plan, until: float, *, shares: bool = True, offloads: bool = True, recomputes: bool = True
) -> Plan | None:
    """Return the plan with the same layout whose stages share out, offload and compute again only what makes it faster
    or lets it fit; None if none is faster.

    Memory is each stage's own, so that what a stage may keep does not depend on the others. At first each stage takes
    what is fastest in all of them of what it has room for; from there, and from the plan on, one stage after another
    takes what makes an iteration shortest. Of the layers of a stage, the fewest that its memory needs are computed
    again.

    Args:
        shares: whether stages may share out less than the plan says.
        offloads: whether they may offload less.
        recomputes: whether they may compute fewer layers again.
        until: CPU seconds of this process, from which on nothing new is begun.
    """
    parallel = plan.training.parallel
    if parallel.pipeline == 1 or not parallel.alike or parallel.stream is not None:
        return None
    zero = parallel.zero if isinstance(parallel.zero, int) else int(parallel.sharded_optimizer)
    whole: Kept = zero, parallel.any_offload, parallel.recompute
    ways = [way for way in _lesser(whole) if (shares or way[0] == whole[0]) and (offloads or way[1] is whole[1])]
    fewer = _fewer(whole[2], max(plan.partition.layers)) if recomputes else [whole[2]]
    if len(ways) * len(fewer) == 1:
        return None
    fewest = {way: _fewest(plan, way, fewer) for way in ways}
    seconds = cache(lambda kept: predict_plan(_with(plan, kept)).iteration_s)
    ways.sort(key=lambda way: float(seconds((way,) * parallel.pipeline)))
    ways_of = [[one for way in ways if (one := fewest[way][stage])] for stage in range(parallel.pipeline)]
    first = tuple(next(iter(some), whole) for some in ways_of)
    best = (whole,) * parallel.pipeline
    for begin in (first, best):
        found_here = begin
        for stage in (*range(parallel.pipeline),) * SWEEPS:
            for way in ways_of[stage]:
                kept = (*found_here[:stage], way, *found_here[stage + 1 :])
                if time.process_time() <= until and seconds(kept) < seconds(found_here):
                    found_here = kept
        best = min(best, found_here, key=seconds)
    if len({*best}) == 1 and best[0][2] is whole[2]:  # which the search has gone through with all its partitions
        return None
    found = _with(plan, best)
    predicted = predict_plan(found)
    return replace(
        found,
        total=predicted.iteration_s,
        known_parts=predicted.parts,
        bound=min(_floor(plan), predicted.iteration_s),
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
    return [all(map(_has_room, kinds)) for kinds in held_on_kinds(plan, trainings)]


def _has_room(held: HeldOnKind) -> bool:
    return held.memory.of(held.layers) <= held.kind.gpu.memory_gib * GIB


def _floor(plan: Plan) -> float:
    """Seconds below which no plan of these sizes is, whatever its stages keep."""
    parallel = plan.training.parallel
    training = replace(plan.training, parallel=replace(parallel, offload=Offload.none))
    kinds: dict[str, NodeKind] = {kind.name: kind for kind in plan.nodes}
    counts = {name: sum(node.name == name for node in plan.nodes) for name in kinds}
    used = [replace(kind, group=replace(kind.group, count=counts[name])) for name, kind in kinds.items()]
    return LowerBounds(used).of_work([training], [Recompute.none], used)
