"""The best plans of a cluster for a command line: what is looked at in which order, and for how long."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fasop.costs.hardware import NodeKind
from fasop.errors import SearchError
from fasop.garbage import seldom_collected
from fasop.search.arguments import Arguments
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.common_steps import (
    WORTH,
    Outcome,
    by_set,
    explore_shares_of,
    later,
    means_of,
    on_sets,
    plans_beside,
    relieved_plans,
    spaces_of,
    spaces_on,
)
from fasop.search.findings import words
from fasop.search.findings.idle_gpus import idle, left, notes, within
from fasop.search.findings.no_plan import why_no_plan
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan, by_time
from fasop.search.progress import bar
from fasop.search.proof import has_boxes, prove
from fasop.search.search import NEAR, Best, Coverage, ShowProgress, explore, look_beside
from fasop.search.space import node_sets
from fasop.search.space.candidates import MOST_MICRO_BATCHES, Space

if TYPE_CHECKING:
    from fasop.search.by_stage.look import Looked

LIMIT_S = 45.0
"""CPU seconds of a search, after which it begins nothing new: nobody waits longer than a minute for an answer."""
SETS_S = 27.0
"""Seconds of these for all sets of nodes; where that is too little, the rest is for all nodes together."""
STAGES_S = 30.0
"""Seconds of these after which no more stages that differ are looked at: what replicas share out comes behind them."""
CLOSE, NEARLY = 0.95, 0.98
"""The part of the best plan's time that bounds are raised to, unless more is asked for; and where it is, at first."""
FEW_BOXES = (0, 25)
"""Boxes of a proof of the first plan, where none was asked for: more if the first number leaves much open."""
RANKED = 10
"""How many plans are found at least, so that the first one is the same however few are shown."""


def best_plans(inputs: Inputs, args: Arguments) -> Outcome:
    """The fastest plans; where none fits, those whose replicas keep parts by memory or share out more or, if these do
    not fit either, of the best way to offload what they may.

    Raises:
        SearchError: there are none, with what would help.
    """
    if inputs.islands:
        return _with_islands(inputs, args)
    means = means_of(inputs)
    for place, ways in enumerate(means, 1):
        found = [_ranked(one, args, inputs, later(means[place:], one, inputs)) for one in ways]
        if outcomes := [outcome for outcome in found if outcome is not None]:
            return min(outcomes, key=lambda outcome: by_time(outcome.plans[0]))
    if (unlike := _unlike_alone(inputs, args)) is not None:
        return unlike
    least = means[-1][-1]
    raise why_no_plan(least.training, least.kinds, least.choices)


def _unlike_alone(inputs: Inputs, args: Arguments) -> Outcome | None:
    """The fastest plan whose stages differ, where no other one has the sizes that were asked for, or fits; None if
    there is none either, or may have more micro-batches than are simulated."""
    if inputs.training.parallel.global_batch_size > MOST_MICRO_BATCHES:
        return None
    sets = node_sets.with_room(inputs.training, [inputs.kinds])
    looked, found = _by_stage(inputs, args, sets, [], time.process_time() + STAGES_S) if sets else (None, [])
    found = [plan for plan in found if inputs.fault(plan) is None]
    if looked is None or not found:
        return None
    summary = words.looked_at_alone(looked), words.proved(math.inf, found[0], looked, closer=not args.prove)
    return Outcome(plans=found, summary=summary, notes=notes(found), looked=looked)


def _ranked(inputs: Inputs, args: Arguments, asked: Inputs, means: Sequence[Inputs]) -> Outcome | None:
    """Do as `best_plans`, with means to save memory that were not `asked` for; None if nothing fits. A plan with others
    of these `means` comes first where it is faster."""
    if args.by_stage and inputs is asked:  # where only other means fit, nobody chose what excludes such stages
        _check_by_stage(inputs)
    begun = time.process_time()
    best = Best(max(args.rows, RANKED), inputs.fault)
    clusters = node_sets.clusters(inputs.kinds) if args.leave_out else [inputs.kinds]
    sets = node_sets.with_room(inputs.training, clusters)
    if not sets:
        return None
    bounds = LowerBounds(inputs.kinds)
    with seldom_collected(), bar("searching", phases=4 if args.prove else 2) as progress:
        spaces = spaces_on(inputs, sets, bounds)
        seen = _explore_sets(spaces, best, progress, begun)
        least, even = seen.least, best.plans[:1]
        unlike = spaces_on(inputs, sets, bounds, uneven=True)
        seen += _explore_sets(unlike, best, progress, begun)
        look_beside([*spaces, *unlike], best, begun + LIMIT_S)
        if not best.plans and best.refused is not None:
            raise SearchError(best.refused)
        if not best.plans:
            return None
        others = _without_idle_nodes(inputs, best.plans, begun + LIMIT_S)
        plans = best.plans
        if args.leave_out:
            plans, others = [*plans, *others], []
        plans = sorted(plans, key=by_time)
        shared = Best(1)
        shared.add(plans[:1])
        explore_shares_of(inputs, sets, shared, begun + LIMIT_S)
        plans = _behind_faster(shared.plans, plans)
        looked, found = _by_stage(inputs, args, sets, [plans[0], *even], begun + STAGES_S)
        plans = _behind_faster(found, plans)
        faster = Best(1, inputs.fault)
        faster.add(plans[:1])
        beside = plans_beside(inputs, means, sets, clusters)
        near_first = [plan for plan in plans[1:] if plan.training.parallel.alike and plan.total < NEAR * plans[0].total]
        for other in beside:
            for more in other.spaces:
                for space in more:
                    space.begin_with(faster.plans[0].nodes)
                covered = explore(more, faster, until=begun + LIMIT_S)
                look_beside(more, faster, begun + LIMIT_S, near_first)
                seen = seen + covered if other.everywhere else seen
            explore_shares_of(other.inputs, other.sets, faster, begun + LIMIT_S)
        plans = _behind_faster(faster.plans, plans)
        sharing = [more for other in beside if other.everywhere for more in other.spaces]
        even_spaces = [*spaces, *(space for more in sharing for space in more if not space.uneven)]
        least = min(least, *(space.least for space in even_spaces))
        here = spaces_of(sorted(_near(plans[:RANKED], sets)), [spaces, unlike])
        plans = [*relieved_plans(inputs, asked, plans[:1], plans[0].total, here, begun + LIMIT_S), *plans]
        for away in (by_set(other.spaces) for other in beside if other.offloads):
            near = _near(plans[:RANKED], [some[0].kinds for some in away])
            for some in (some for number, some in enumerate(away) if number in near):
                plans = [*relieved_plans(inputs, asked, [], plans[0].total, some, begun + LIMIT_S), *plans]
        if args.prove:
            from fasop.search.closer_bounds import LITTLE, closer_least

            plans = prove(plans, progress, inputs.fault)
            fastest = plans[0].total
            # First less: the same work then goes farther. All of it takes little, or too much.
            least = max(least, closer_least(even_spaces, NEARLY * fastest, progress=progress))
            if least >= NEARLY * fastest:
                least = max(least, closer_least(even_spaces, fastest, LITTLE, progress))
        else:
            for boxes in FEW_BOXES:
                if 1 - plans[0].gap < CLOSE and (boxes == FEW_BOXES[0] or has_boxes(plans[0])):
                    plans = sorted([*prove(plans[:1], fault=inputs.fault, boxes=boxes), *plans[1:]], key=by_time)
            if least < CLOSE * plans[0].total:
                from fasop.search.closer_bounds import LITTLE, closer_least

                least = max(least, closer_least(even_spaces, CLOSE * plans[0].total, LITTLE))
    all_alike = [plan for plan in plans if plan.training.parallel.alike]
    alike, even = all_alike[0], sorted([*even, *(p for p in all_alike if not p.training.parallel.shares)], key=by_time)
    where = node_sets.described(inputs.training, inputs.kinds) if args.leave_out else "all nodes"
    summary = (
        words.offloaded(plans[0]),
        words.parts_by_memory(plans[0]),
        words.gained_by_stage(plans[0], alike),
        words.kept_by_stage(plans[0], alike),
        words.gained(alike, even),
        words.nodes_used(inputs, plans[0]),
        words.looked_at(inputs, seen, where, looked, with_zero=bool(sharing)),
        words.proved(least, plans[0], looked, closer=not args.prove),
        _proposal(inputs, plans[0], begun + LIMIT_S),
    )
    shown = _first(plans, args.rows)
    return Outcome(
        plans=shown,
        summary=[*filter(None, summary)],
        notes=notes(shown, others),
        even=even[0] if even else None,
        looked=looked,
    )


def _proposal(inputs: Inputs, best: Plan, until: float) -> str:
    """What islands would gain where slow links join rooms of nodes."""
    if not inputs.may_propose_islands:
        return ""
    from fasop.search.islands import in_words, proposed  # few clusters have rooms

    plan = proposed(inputs, WORTH * best.total, until)
    if plan is None:
        return ""
    every = plan.training.sync_every
    return (
        f"With train.sync_every={every} an iteration would take {plan.total * 1e3:.1f} ms: {in_words(plan)}. Islands "
        f"learn a little less from as many samples, which 'tdpp rehearse learning' shows; a search with "
        f"train.sync_every={every} ranks such plans."
    )


def _with_islands(inputs: Inputs, args: Arguments) -> Outcome:
    from fasop.search.islands import in_words, island_plans

    every = inputs.training.sync_every
    plans = island_plans(inputs, args.rows, time.process_time() + LIMIT_S)
    if not plans:
        raise SearchError(
            f"train.sync_every={every}: no plan with islands fits into memory and "
            "gives every replica a micro-batch; islands are groups of nodes, or equal parts of a single group; use "
            "train.sync_every=null, or other cluster.groups"
        )
    return Outcome(plans=plans, summary=[f"In the first plan {in_words(plans[0])}."], notes=notes(plans))


def _first(plans: Sequence[Plan], rows: int) -> list[Plan]:
    """The first of these plans, so many; and where they leave nodes idle, the first one without these nodes."""
    shown = [*plans[:rows]]
    for plan in shown:  # which grows
        nodes = left(plan)
        if idle(plan).whole and within(shown, nodes) is None and (better := within(plans, nodes)) is not None:
            shown.append(better)
    return [plan for plan in plans if any(plan is one for one in shown)]


def _check_by_stage(inputs: Inputs) -> None:
    """Raises SearchError where no plan has stages that differ."""
    from fasop.search.by_stage.closing import WHOLE
    from fasop.search.by_stage.look import why_not  # a search with by_stage=false needs none of it

    if why := why_not(inputs.training, inputs.kinds, inputs.choices, WHOLE):
        raise SearchError(f"by_stage=true: {why}")


def _by_stage(
    inputs: Inputs, args: Arguments, sets: Sequence[Sequence[NodeKind]], plans: Sequence[Plan], until: float
) -> tuple[Looked | None, list[Plan]]:
    """What was gone through of plans whose stages differ, on all nodes and on those of these plans, the best one
    first, and the fastest of them if it is faster than that, or that one again."""
    if args.by_stage is False:
        return None, []
    from fasop.search.by_stage.closing import QUICK, WHOLE
    from fasop.search.by_stage.look import explore_stages

    keep = Best(1)
    keep.add(plans[:1])
    whole = replace(WHOLE, layouts=QUICK.layouts, gpus=QUICK.gpus) if args.prove and not args.by_stage else WHOLE
    nodes, looked = [sets[number] for number in _near(plans, sets)], None
    # The quick look comes first in any case: with more layouts, work may end before it comes to the best of the few.
    for effort in (QUICK, whole) if args.by_stage or args.prove else (QUICK,):
        looked = explore_stages(inputs.training, nodes, inputs.choices, keep, effort, until) or looked
    return looked, keep.plans


def _near(plans: Sequence[Plan], sets: Sequence[Sequence[NodeKind]]) -> list[int]:
    """The numbers of the first set of nodes, and then of those that have these plans."""
    return [*dict.fromkeys((0, *(number for number, _ in on_sets(plans, sets))))]


def _behind_faster(found: Sequence[Plan], plans: Sequence[Plan]) -> list[Plan]:
    """The plans, behind those that were found and take so much less than the first one that they are worth it."""
    return [*(plan for plan in found if plan.total < WORTH * plans[0].total), *plans]


def _explore_sets(spaces: Sequence[Space], best: Best, progress: ShowProgress, begun: float) -> Coverage:
    """All of them, the first one in any case."""
    seen = explore(spaces, best, progress, begun + (LIMIT_S if len(spaces) == 1 else SETS_S))
    if seen.left and len(spaces) > 1:  # the nodes that were looked at may be far from the best
        explore(spaces[:1], best, progress, begun + LIMIT_S)
    return seen


def _without_idle_nodes(inputs: Inputs, plans: Sequence[Plan], until: float) -> list[Plan]:
    """The best plans on the nodes of plans but for those that compute nothing, where `plans` have none there."""
    found, left_to_see, seen = list[Plan](), [*plans], set[tuple[tuple[str, int], ...]]()
    while left_to_see:
        plan = left_to_see.pop(0)
        nodes = left(plan)
        if not idle(plan).whole or within([*plans, *found], nodes) or tuple(sorted(nodes.items())) in seen:
            continue
        seen.add(tuple(sorted(nodes.items())))
        kinds = [
            replace(kind, group=replace(kind.group, count=nodes[kind.name]))
            for kind in inputs.kinds
            if nodes[kind.name]
        ]
        best = Best(1, inputs.fault)
        for uneven in (False, True):
            explore(spaces_on(inputs, [kinds], uneven=uneven), best, until=until)
        found += best.plans
        left_to_see += best.plans
    return found
