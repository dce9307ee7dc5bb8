"""What a command line searches: the best plans of a cluster, or the front of time against cost over all its sizes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from conf.schema.values.partition import Partition
from conf.visible import plural
from fasop.costs.hardware import NodeKind
from fasop.errors import SearchError
from fasop.search.arguments import Arguments, First
from fasop.search.findings import words
from fasop.search.findings.idle_gpus import idle, left, notes, within
from fasop.search.findings.no_plan import why_no_plan
from fasop.search.front import COST, ENERGY, Expense, Front, Limits, check_known, nothing_within
from fasop.search.inputs import Inputs, by_memory, offloading, scattering
from fasop.search.lower_bound import LowerBounds
from fasop.search.plan import Fault, Plan, by_time, no_fault
from fasop.search.search import Best, Coverage, PlanCollector, ShowProgress, explore, look_beside, no_progress
from fasop.search.space import node_sets
from fasop.search.space.candidates import Space
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.parallel_config import Offload, Recompute

if TYPE_CHECKING:
    from fasop.search.by_stage.look import Looked

LIMIT_S = 45.0
"""CPU seconds of a search, after which it begins nothing new: nobody waits longer than a minute for an answer."""
SETS_S = 27.0
"""Seconds of these for all sets of nodes; where that is too little, the rest is for all nodes together."""
FRONT_S = 90.0
"""CPU seconds of a front. 80 sets of nodes take about 17; what comes last, plans with unequal shares,
may be the fastest."""
SHARES_S = 5.0
"""Seconds of a front that are, at least, for plans with unequal shares."""
BESIDE_S = 3.0
"""Seconds of a front for the other schedules of its plans' sizes."""
STAGES_S = 4.0
"""Seconds of a front for plans whose stages differ, on the nodes of its plans."""
RELIEF_S, LULL = 3.0, 5
"""Seconds of a front for plans that compute only some of their layers again; and sets of nodes in a row, on which none
is of worth, after which no further ones are looked at."""
WORTH = 0.999
"""The part of the best plan's time that a plan with other shares has to beat to be worth it."""
CLOSE, NEARLY = 0.95, 0.98
"""The part of the best plan's time that bounds are raised to, unless more is asked for; and where it is, at first."""
BOXES = (200, 0)
"""Boxes that a proof halves, at most: for the first plan, and for every other one."""
FEW_BOXES = (0, 25)
"""Likewise for the first plan, where no proof was asked for: more if the first number leaves much open."""
PASSES = 2**13
"""Parts times micro-batches of a plan; of one with more, which takes longer to simulate, only the first one is
proved."""
RANKED, RELIEVED = 10, 8
"""How many plans are found at least, so that the first one is the same however few are shown; and how many that compute
layers again are relieved, beside the first one."""


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


def best_plans(inputs: Inputs, args: Arguments) -> Outcome:
    """The fastest plans; where none fits, those whose replicas keep parts by memory or share out more or, if these do
    not fit either, of the best way to offload what they may.

    Raises:
        SearchError: there are none, with what would help.
    """
    if inputs.islands:
        return _with_islands(inputs, args)
    means = _means(inputs)
    for ways in means:
        if outcomes := [outcome for one in ways if (outcome := _ranked(one, args, inputs)) is not None]:
            return min(outcomes, key=lambda outcome: by_time(outcome.plans[0]))
    least = means[-1][-1]
    raise why_no_plan(least.training, least.kinds, least.choices)


def _means(inputs: Inputs) -> list[list[Inputs]]:
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


def _ranked(inputs: Inputs, args: Arguments, asked: Inputs) -> Outcome | None:
    """Do as `best_plans`, with means to save memory that were not `asked` for; None if nothing fits."""
    if args.by_stage:
        _check_by_stage(inputs)
    begun, rows = time.process_time(), max(args.top, args.explain or 0)
    best = Best(max(rows, RANKED), inputs.fault)
    sets = node_sets.with_room(inputs.training, node_sets.clusters(inputs.kinds) if args.leave_out else [inputs.kinds])
    if not sets:
        return None
    bounds = LowerBounds(inputs.kinds)
    with bar("searching", phases=4 if args.prove else 2) as progress:
        spaces = _spaces(inputs, sets, bounds)
        seen = _explore_sets(spaces, best, progress, begun)
        least, even = seen.least, best.plans[:1]
        unlike = _spaces(inputs, sets, bounds, uneven=True)
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
        _explore_shares(inputs, sets, shared, begun + LIMIT_S)
        plans = [*(plan for plan in shared.plans if plan.total < WORTH * plans[0].total), *plans]
        looked, found = _by_stage(inputs, args, sets, [plans[0], *even], begun + LIMIT_S)
        plans = [*found, *plans]
        near = {0, *(number for number, _ in _on_sets(plans[:RANKED], sets))}
        here = _spaces_of(sorted(near), [spaces, unlike])
        plans = [*_relieved(inputs, asked, plans[:1], plans[0].total, here, begun + LIMIT_S), *plans]
        if args.prove:
            from fasop.search.closer_bounds import LITTLE, closer_least

            plans = prove(plans, progress, inputs.fault)
            fastest = plans[0].total
            # First less: the same work then goes farther. All of it takes little, or too much.
            least = max(least, closer_least(spaces, NEARLY * fastest, progress=progress))
            if least >= NEARLY * fastest:
                least = max(least, closer_least(spaces, fastest, LITTLE, progress))
        else:
            for boxes in FEW_BOXES:
                if 1 - plans[0].gap < CLOSE and (boxes == FEW_BOXES[0] or _has_boxes(plans[0])):
                    plans = sorted([*prove(plans[:1], fault=inputs.fault, boxes=boxes), *plans[1:]], key=by_time)
            if least < CLOSE * plans[0].total:
                from fasop.search.closer_bounds import LITTLE, closer_least

                least = max(least, closer_least(spaces, CLOSE * plans[0].total, LITTLE))
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
        words.looked_at(inputs, seen, where, looked),
        words.proved(least, plans[0], looked, closer=not args.prove),
        _proposal(inputs, plans[0], begun + LIMIT_S),
    )
    shown = _first(plans, rows)
    return Outcome(
        plans=shown,
        summary=[*filter(None, summary)],
        notes=notes(shown, others),
        even=even[0] if even else None,
        looked=looked,
    )


def _explore_shares(inputs: Inputs, sets: Sequence[Sequence[NodeKind]], keep: PlanCollector, until: float) -> None:
    """Hands plans with unequal shares to `keep`, of the sets that have unlike nodes."""
    if any(sum(kind.group.count > 0 for kind in kinds) > 1 for kinds in sets):
        from fasop.search.shares.unequal_shares import explore_shares  # nodes that are alike need none of it

        explore_shares(inputs.training, sets, inputs.choices, keep, until)


def _relieved(
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
    plans = island_plans(inputs, max(args.top, args.explain or 0), time.process_time() + LIMIT_S)
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
    first, and the fastest of them if it is faster than that."""
    if args.by_stage is False:
        return None, []
    from fasop.search.by_stage.closing import QUICK, WHOLE
    from fasop.search.by_stage.look import explore_stages

    best, keep = plans[0], Best(1)
    numbers = dict.fromkeys((0, *(number for number, _ in _on_sets(plans, sets))))
    keep.add([best])
    whole = replace(WHOLE, layouts=QUICK.layouts, gpus=QUICK.gpus) if args.prove and not args.by_stage else WHOLE
    nodes, looked = [sets[number] for number in numbers], None
    # The quick look comes first in any case: with more layouts, work may end before it comes to the best of the few.
    for effort in (QUICK, whole) if args.by_stage or args.prove else (QUICK,):
        looked = explore_stages(inputs.training, nodes, inputs.choices, keep, effort, until) or looked
    return looked, [plan for plan in keep.plans if plan.total < WORTH * best.total]


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
            explore(_spaces(inputs, [kinds], uneven=uneven), best, until=until)
        found += best.plans
        left_to_see += best.plans
    return found


def front(inputs: Inputs, args: Arguments) -> Outcome:
    """The plans that no other one beats in both time and cost, or time and energy, in the order that is asked for.

    Raises:
        SearchError: a node has no price, a GPU no power, or no plan is within the limits.
    """
    expense = against(args)
    check_known(inputs.kinds, expense)
    limits = Limits(cost=args.max_cost, days=args.max_days)
    for one in (one for ways in _means(inputs) for one in ways):
        every, seen, tried = _front(one, inputs, expense)
        if every:
            inputs = one
            break
    else:
        raise why_no_plan(one.training, one.kinds, one.choices)
    plans = limits.keep(every, inputs.run, expense)
    if not plans:
        raise nothing_within(every, inputs.run, limits, expense)
    shown = plans if args.pareto is First.time else plans[::-1]
    whole = f"the whole training has {plural(inputs.run.iterations, 'iteration')}"
    amount = "dollars" if expense is COST else expense.unit
    known = whole if inputs.run.known else f"add tokens=N to see days and {amount} of a whole training"
    covers = (
        "Prices cover the nodes that a plan uses"
        if expense is COST
        else "The energy is that of all GPUs of the nodes that a plan uses, at cluster.gpus.<key>.watts"
    )
    summary = (
        words.front(plans, expense.what, tried),
        *filter(None, [words.offloaded(plans[0]), words.parts_by_memory(plans[0])]),
        f"{covers}; {known}.",
        *([] if inputs.run.failures is None else [inputs.run.failures.said(shown[0].nodes, shown[0].total)]),
        words.looked_at(inputs, seen, node_sets.described(inputs.training, inputs.kinds)),
        f"Proved: {words.best_layers(shown[0].gap)}",
    )
    return Outcome(plans=shown, summary=summary, notes=notes(shown))


def against(args: Arguments) -> Expense:
    """Returns what the front of a search weighs against time."""
    return ENERGY if args.pareto is First.energy else COST


def _front(inputs: Inputs, asked: Inputs, expense: Expense) -> tuple[Sequence[Plan], Coverage, int]:
    """The plans, what was gone through, and on how many sets of nodes stages that differ were tried; like `_ranked`."""
    kept = Front(inputs.run, inputs.fault, expense)
    until = time.process_time() + FRONT_S
    sets, bounds = node_sets.with_room(inputs.training, node_sets.clusters(inputs.kinds)), LowerBounds(inputs.kinds)
    if not sets:
        return [], Coverage(sizes=0, searched=0, climbed=0, least=np.inf), 0
    with bar("searching", phases=2) as progress:
        spaces, unlike = _spaces(inputs, sets, bounds), _spaces(inputs, sets, bounds, uneven=True)
        seen = explore(spaces, kept, progress, until)
        until = max(time.process_time(), until - SHARES_S) + SHARES_S
        seen += explore(unlike, kept, progress, until)
        _explore_shares(inputs, sets, kept, until + SHARES_S)
        until = time.process_time() + BESIDE_S
        for plan in kept.plans:
            best = Best(1, inputs.fault)
            best.add([plan])
            look_beside([*spaces, *unlike], best, until)
            kept.add(best.plans)
        tried = _front_by_stage(inputs, sets, kept)
        if kept.plans:
            _front_relieved(inputs, asked, sets, [spaces, unlike], kept)
    return kept.plans, seen, tried


def _front_by_stage(inputs: Inputs, sets: Sequence[Sequence[NodeKind]], kept: Front) -> int:
    """Adds plans whose stages differ: first those near each plan of a front, which take the least time to find, and
    then the fastest ones on the nodes of each plan of a front, the fastest first, and behind that one on all nodes.
    Returns on how many sets of nodes any were looked at."""
    from fasop.search.by_stage.closing import QUICK
    from fasop.search.by_stage.look import explore_near, explore_stages

    tried, until = set[int](), time.process_time() + STAGES_S
    for explore_some in (explore_near, explore_stages):
        known = _on_sets(kept.plans, sets)
        for number, plan in dict([*known[:1], *((0, plan) for _, plan in known[:1]), *known]).items():
            if time.process_time() <= until:
                best = Best(1, inputs.fault)
                best.add([plan])
                if explore_some(inputs.training, [sets[number]], inputs.choices, best, QUICK, until):
                    tried.add(number)
                kept.add(best.plans)
    return len(tried)


def _front_relieved(
    inputs: Inputs, asked: Inputs, sets: Sequence[Sequence[NodeKind]], every: Sequence[Sequence[Space]], kept: Front
) -> None:
    """Adds plans whose stages keep only what they need: on the nodes of the fastest plan first, and then on the sets
    with the fewest GPUs, which have the least room, until there are none on some sets in a row."""
    until, in_vain = time.process_time() + RELIEF_S, 0
    fastest = [number for number, _ in _on_sets(kept.plans[:1], sets)]
    for number in dict.fromkeys([*fastest, *reversed(range(len(sets)))]):
        if time.process_time() > until or in_vain == LULL:
            break
        plans = [plan for at, plan in _on_sets(kept.plans, sets) if at == number]
        here = _spaces_of([number], every)
        relief = _relieved(inputs, asked, plans, kept.slowest(sets[number]), here, until)
        in_vain = 0 if relief else in_vain + 1
        kept.add(relief)


def _spaces_of(numbers: Iterable[int], every: Sequence[Sequence[Space]]) -> list[Space]:
    """Those of the sets with these numbers, of all kinds of plans that have any."""
    return [spaces[number] for spaces in every if spaces for number in numbers]


def _on_sets(plans: Sequence[Plan], sets: Sequence[Sequence[NodeKind]]) -> list[tuple[int, Plan]]:
    """The plans whose nodes are one of these sets, each with the number of that set."""
    counts = [{kind.name: kind.group.count for kind in some} for some in sets]
    of_plans = [(Counter(node.name for node in plan.nodes), plan) for plan in plans]
    return [(counts.index(used), plan) for used, plan in of_plans if used in counts]


def _spaces(
    inputs: Inputs, some: Sequence[Sequence[NodeKind]], bounds: LowerBounds | None = None, *, uneven: bool = False
) -> list[Space]:
    known = bounds or LowerBounds(inputs.kinds)
    if uneven and inputs.training.equal_only:
        return []
    return [Space(inputs.training, kinds, inputs.choices, known, uneven=uneven) for kinds in some]


def prove(
    plans: Sequence[Plan], progress: ShowProgress = no_progress, fault: Fault = no_fault, boxes: int = BOXES[0]
) -> list[Plan]:
    """The same plans with tighter bounds, and with better partitions where such were found; the best first. Of the
    first one so many boxes are looked at."""
    found = []
    for number, plan in enumerate(plans):
        lines = plan.pipelines
        small = lines is not None and lines.parts_count * lines.micro_batches <= PASSES
        can = lines is not None and (small or number == 0)
        better = _proved(plan, lines, BOXES[1] if number else boxes) if lines is not None and can else plan
        found.append(better if fault(better) is None else plan)
        progress((number + 1) / len(plans))
    return sorted(found, key=by_time)


def _has_boxes(plan: Plan) -> bool:
    """Whether more boxes prove more of it: not where layers differ."""
    return plan.pipelines is not None and plan.pipelines.order is None


def _proved(plan: Plan, lines: Pipelines, boxes: int) -> Plan:
    from fasop.partition.exact import proved  # most first plans are close to their bounds

    layers = plan.partition.layers
    proof = proved(lines, sum(layers), np.array([layers]).T, boxes)
    partition = Partition(tuple(proof.partition[:, 0].tolist()))
    parallel = replace(plan.training.parallel, partition=partition.layers)
    return replace(
        plan,
        training=replace(plan.training, parallel=parallel),
        partition=partition,
        total=proof.seconds,
        known_parts=lines.parts(proof.partition),
        bound=max(plan.bound, proof.bound),
    )


@contextmanager
def bar(title: str, phases: int = 1) -> Iterator[ShowProgress]:
    """On stderr; it is gone when the search is over. It never goes back: each phase has an equal part of it, and the
    next one begins where less is done than before."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=1.0)
        phase, before, farthest = 0, 0.0, 0.0

        def show(done: float) -> None:
            nonlocal phase, before, farthest
            if done < before:
                phase = min(phase + 1, phases - 1)
            before, farthest = done, max(farthest, (phase + min(done, 1.0)) / phases)
            shown.update(task, completed=farthest)

        yield show
