"""What rankings and fronts have in common: the spaces that they search, the steps that follow, and the outcome."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fasop.costs.hardware import NodeKind
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.inputs import Inputs, by_memory, offloading, scattering
from fasop.search.plan import Plan
from fasop.search.search import PlanCollector
from fasop.search.space import node_sets
from fasop.search.space.candidates import Space
from megatron_ext.contract.parallel_config import Offload, Recompute, Shards

if TYPE_CHECKING:
    from fasop.search.by_stage.look import Looked

WORTH = 0.999
"""The part of the best plan's time that a plan with other shares has to beat to be worth it."""
SCARCE = 10.0
"""Copies of weights, gradients and what the optimizer keeps: where the memory of all GPUs together has room for so
many, none is short of it for long."""
RELIEVED = 8
"""How many plans that compute layers again are relieved, beside the first one."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    plans: Sequence[Plan]
    summary: Sequence[str]
    """Lines: what the first plan gains, what was looked at, what is proved."""
    notes: Sequence[str]
    """What a reader must know of single plans."""
    even: Plan | None = None
    """The best plan with equal shares; None of a front, or where nothing divides the batch evenly."""
    looked: Looked | None = None
    """What was gone through of plans whose stages differ."""


def means_of(inputs: Inputs) -> list[list[Inputs]]:
    """List what is searched one after another until anything fits: the plans that were asked for, and those with other
    means to save memory."""
    scattered = [scattering(inputs, zero) for zero in inputs.may_scatter]
    offloaded = [offloading(one, way) for one in (inputs, *scattered) for way in inputs.may_offload]
    found: list[list[Inputs | None]] = [
        [inputs],
        [by_memory(inputs)],
        [*scattered],
        [*map(by_memory, scattered)],
        [*offloaded],
        [*map(by_memory, offloaded)],
    ]
    return [some for ways in found if (some := [one for one in ways if one is not None])]


def spaces_on(
    inputs: Inputs, some: Sequence[Sequence[NodeKind]], bounds: LowerBounds | None = None, *, uneven: bool = False
) -> list[Space]:
    known = bounds or LowerBounds(inputs.kinds)
    if uneven and inputs.training.equal_only:
        return []
    return [Space(inputs.training, kinds, inputs.choices, known, uneven=uneven) for kinds in some]


def later(means: Sequence[Sequence[Inputs]], inputs: Inputs, asked: Inputs) -> list[Inputs]:
    """List those of the `means` behind some `inputs` that may have faster plans where these have any: none behind those
    that offload what was not `asked` for, and none that both offload and share by memory."""
    given = asked.training.parallel
    if inputs.training.parallel.offload is not given.offload:
        return []
    kept = [(one, one.training.parallel) for ways in means for one in ways]
    return [one for one, parallel in kept if parallel.offload is given.offload or parallel.shards is given.shards]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Plans with other means to save memory, some of which may be faster than all that need none of these."""

    inputs: Inputs
    sets: Sequence[Sequence[NodeKind]]
    spaces: Sequence[list[Space]]
    """Those with equal shares, and those with shares that differ by one, where there are such."""
    everywhere: bool
    """Whether they are looked at on all sets of nodes: only the stage of ZeRO is another one."""
    offloads: bool
    """Whether they offload what the others do not."""


def plans_beside(
    inputs: Inputs,
    means: Sequence[Inputs],
    sets: Sequence[Sequence[NodeKind]],
    every: Sequence[Sequence[NodeKind]],
) -> list[Beside]:
    """List which of these `means` to save memory are compared with plans that fit on these `sets` of nodes: those of
    each stage of ZeRO; and on those of `every` set whose GPUs have little room for what the optimizer needs, those that
    keep unlike parts by memory, or that in the memory of nodes."""
    enough = {*map(id, node_sets.with_room(inputs.training, every, SCARCE))}
    short = [kinds for kinds in every if id(kinds) not in enough]
    known, found = inputs.training.parallel, []
    for one in means:
        parallel, some, bounds = one.training.parallel, sets, LowerBounds(one.kinds)
        everywhere = (parallel.offload, parallel.shards) == (known.offload, known.shards)
        offloads = parallel.offload is not known.offload
        if not everywhere:
            some = node_sets.with_room(one.training, short)
        if parallel.shards is Shards.memory:
            some = [kinds for kinds in some if len({kind.gpu.memory_gib for kind in kinds}) > 1]
        both = [spaces_on(one, some, bounds, uneven=uneven) for uneven in (False, True)]
        spaces = [spaces for spaces in both if any(map(len, spaces))]
        found.append(Beside(inputs=one, sets=some, spaces=spaces, everywhere=everywhere, offloads=offloads))
    return found


def spaces_of(numbers: Iterable[int], every: Sequence[Sequence[Space]]) -> list[Space]:
    """Those of the sets with these numbers, of all kinds of plans that have any."""
    return [spaces[number] for spaces in every if spaces for number in numbers]


def by_set(every: Iterable[Sequence[Space]]) -> list[list[Space]]:
    """The spaces, those on the same nodes together."""
    found = defaultdict[tuple[tuple[str, int], ...], list[Space]](list)
    for space in (space for spaces in every for space in spaces):
        found[tuple((kind.name, kind.group.count) for kind in space.kinds)].append(space)
    return [*found.values()]


def on_sets(plans: Sequence[Plan], sets: Sequence[Sequence[NodeKind]]) -> list[tuple[int, Plan]]:
    """The plans whose nodes are one of these sets, each with the number of that set."""
    counts = [{kind.name: kind.group.count for kind in some} for some in sets]
    of_plans = [(Counter(node.name for node in plan.nodes), plan) for plan in plans]
    return [(counts.index(used), plan) for used, plan in of_plans if used in counts]


def explore_shares_of(inputs: Inputs, sets: Sequence[Sequence[NodeKind]], keep: PlanCollector, until: float) -> None:
    """Hands plans with unequal shares to `keep`, of the sets that have unlike nodes."""
    if any(sum(kind.group.count > 0 for kind in kinds) > 1 for kinds in sets):
        from fasop.search.shares.unequal_shares import explore_shares  # nodes that are alike need none of it

        explore_shares(inputs.training, sets, inputs.choices, keep, until)


def relieved_plans(
    inputs: Inputs, asked: Inputs, plans: Sequence[Plan], fastest: float, spaces: Sequence[Space], until: float
) -> list[Plan]:
    """The fastest plan whose stages keep, offload and compute again only what they need, if it takes less than so many
    seconds: of the sizes of these plans, or of those in these spaces that only fit since they compute layers again."""
    recomputes = {Recompute.none, Recompute.full} <= {*asked.choices.recompute} and not asked.training.equal_only
    tight, best = list[Plan](), list[Plan]()
    if recomputes and any(space.floor < WORTH * fastest for space in spaces):
        from fasop.search.by_stage.tight import tight_plans  # most searches are of plans that fit

        tight = tight_plans(spaces, WORTH * fastest, until)[:RELIEVED]
    for one in [*plans, *tight]:
        parallel = one.training.parallel
        again = parallel.recompute.way is Recompute.full
        if not (again or parallel.sharded_optimizer or parallel.zero or parallel.any_offload is not Offload.none):
            continue  # it keeps no more than it needs
        from fasop.search.by_stage.kept import relieved

        shares, offloads = bool(asked.may_scatter), bool(asked.may_offload)
        relief = relieved(one, until, shares=shares, offloads=offloads, recomputes=recomputes)
        if relief is not None and relief.total < WORTH * fastest and inputs.fault(relief) is None:
            best, fastest = [relief], relief.total
        if time.process_time() > until:
            break
    return best
