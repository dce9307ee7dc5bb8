"""The front of time against cost or energy, over all sets of nodes of a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from conf.visible import plural
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.frozen import replace
from fasop.garbage import seldom_collected
from fasop.search.arguments import Arguments, First
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.common_steps import (
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
from fasop.search.findings.idle_gpus import notes
from fasop.search.findings.no_plan import why_no_plan
from fasop.search.front import COST, ENERGY, Expense, Front, Limits, check_known, nothing_within
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan
from fasop.search.progress import bar
from fasop.search.search import Best, Coverage, explore, look_beside
from fasop.search.space import node_sets
from fasop.search.space.candidates import Space

FRONT_S = 90.0
"""CPU seconds of a front, after which it begins nothing new. 80 sets of nodes take about 9."""
LEAST_S = 5.0
"""CPU seconds that each of its steps has at least. They are for what takes unforeseen long: so that every run finds the
same front, what is looked at is counted."""
WHOLLY, NEAR = 128, 10
"""GPUs of the sets of nodes on which all plans whose stages differ are looked at, together, at most; and how many GPUs
of sets on which only those near a plan are count as one of these: they take about as long."""
MOST_STAGES = 32
"""Stages of a plan near which such plans are looked for, at most, but for the fastest plan: of 11 plans with more two
had any, faster by 0.7 %, in two thirds of the time of all."""
PATIENCE = 1
"""How many layouts near those that were found near a plan are searched until one is faster, at most. (With 4 the front
of `benchmarks.pareto` takes 2 CPU seconds more, and four of its points are 0.1 to 1.1 % faster.)"""
RELIEVED, LULL = 8, 5
"""Sets of nodes on which plans are found that compute only some of their layers again, at most, which takes about a
second of each; and sets in a row, on which none is of worth, after which no further ones are looked at."""


def front(inputs: Inputs, args: Arguments) -> Outcome:
    """The plans that no other one beats in both time and cost, or time and energy, in the order that is asked for.

    Raises:
        SearchError: a node has no price, a GPU no power, no run would last to a save, or no plan is within the limits.
    """
    expense = against(args)
    check_known(inputs.kinds, expense)
    if inputs.run.failures is not None:
        inputs.run.failures.check(inputs.kinds, inputs.run.length)
    limits = Limits(cost=args.max_cost, days=args.max_days)
    asked = inputs
    means = means_of(inputs)
    for place, ways in enumerate(means, 1):
        kept, last = Front(asked.run, asked.fault, expense), time.process_time() + FRONT_S
        seen, tried = Coverage(sizes=0, searched=0, climbed=0, least=np.inf), 0
        for one in ways:
            if kept.plans and time.process_time() > last:
                break
            covered, on_sets_of_one = _explore(one, asked, later(means[place:], one, asked), kept, last)
            seen, tried = seen + covered, max(tried, on_sets_of_one)
        inputs = ways[-1]
        if kept.plans:
            break
    else:
        raise why_no_plan(inputs.training, inputs.kinds, inputs.choices)
    plans = limits.keep(kept.plans, inputs.run, expense)
    if not plans:
        raise nothing_within(kept.plans, inputs.run, limits, expense)
    shown = plans if args.pareto is First.time else plans[::-1]
    whole = f"the whole training has {plural(inputs.run.iterations, 'iteration')}"
    amount = "dollars" if expense is COST else expense.unit
    known = whole if inputs.run.known else f"add tokens=N to see days and {amount} of a whole training"
    covers = (
        "Prices cover the nodes that a plan uses"
        if expense is COST
        else "The energy is that of all GPUs of the nodes that a plan uses, at cluster.gpus.<key>.watts"
    )
    with_zero = inputs is asked and bool(asked.may_scatter)
    summary = (
        words.front(plans, expense.what, tried),
        *filter(None, [words.offloaded(plans[0]), words.parts_by_memory(plans[0])]),
        f"{covers}; {known}.",
        *(
            []
            if (fails := inputs.run.failures) is None
            else [fails.said(shown[0].nodes, shown[0].total, asked.run.length)]
        ),
        words.looked_at(inputs, seen, node_sets.described(inputs.training, inputs.kinds), with_zero=with_zero),
        f"Proved: {words.best_layers(shown[0].gap)}",
    )
    return Outcome(plans=shown, summary=summary, notes=notes(shown))


def against(args: Arguments) -> Expense:
    """Returns what the front of a search weighs against time."""
    return ENERGY if args.pareto is First.energy else COST


def _explore(inputs: Inputs, asked: Inputs, means: Sequence[Inputs], kept: Front, last: float) -> tuple[Coverage, int]:
    """Adds plans to what is `kept`, like `_ranked`; returns what was gone through, and on how many sets of nodes stages
    that differ were tried."""
    clusters, bounds = node_sets.clusters(inputs.kinds), LowerBounds(inputs.kinds)
    sets = node_sets.with_room(inputs.training, clusters)
    if not sets:
        return Coverage(sizes=0, searched=0, climbed=0, least=np.inf), 0
    with seldom_collected(), bar("searching", phases=2) as progress:
        spaces, unlike = spaces_on(inputs, sets, bounds), spaces_on(inputs, sets, bounds, uneven=True)
        seen = explore(spaces, kept, progress, _until(last), sketched=bool(kept.plans))
        seen += explore(unlike, kept, progress, _until(last), sketched=bool(kept.plans))
        explore_shares_of(inputs, sets, kept, _until(last))
        until = _until(last)
        for number, plan in on_sets(kept.plans, sets):
            best = _best_of(plan, inputs)
            look_beside(spaces_of([number], [spaces, unlike]), best, until)
            kept.add(best.plans)
        tried = _front_by_stage(inputs, sets, kept, _until(last))
        if kept.plans:  # where nothing fits, other means to save memory come first
            beside = plans_beside(inputs, means, sets, clusters)
            on_all = [other for other in beside if other.everywhere][-1:]
            for other in [*on_all, *(other for other in beside if not other.everywhere)]:
                for more in other.spaces:
                    covered = explore(more, kept, until=_until(last), sketched=True)
                    seen = seen + covered if other.everywhere else seen
            known = list[Plan]()
            for every in ([spaces, unlike], *(other.spaces for other in beside if other.offloads)):
                _front_relieved(inputs, asked, every, kept, known, _until(last))
    return seen, tried


def _until(last: float) -> float:
    """Return until when a step may begin anything that begins now, in a front that ends at `last`."""
    return max(last, time.process_time() + LEAST_S)


def _front_by_stage(inputs: Inputs, sets: Sequence[Sequence[NodeKind]], kept: Front, until: float) -> int:
    """Adds plans whose stages differ: first those near each plan of a front; then, where these are few, the fastest
    ones on the nodes of each plan of a front: of the fastest plan, on all nodes, and on the others, which take the less
    time the fewer GPUs they have; what a search finds on the nodes of the fastest plan; and at last a little of what is
    near those that were found near other plans. Returns on how many sets of nodes any were looked at.

    What is looked at is counted, not timed, so that a front is the same in every run: only after so many CPU seconds of
    this process nothing new is begun.
    """
    from fasop.search.by_stage.closing import QUICK
    from fasop.search.by_stage.layout_climb import LayoutClimb
    from fasop.search.by_stage.look import explore_near, explore_stages, go_on

    brief = replace(QUICK, patience=PATIENCE, in_vain=0)
    climbs, wholly, room = dict[int, LayoutClimb](), list[tuple[int, Plan]](), NEAR * WHOLLY
    tried = set[int]()

    def look_near(number: int, plan: Plan) -> None:
        if time.process_time() <= until:
            best = _best_of(plan, inputs)
            if climb := explore_near(inputs.training, [sets[number]], inputs.choices, best, brief, until):
                climbs[number] = climb
            kept.add(best.plans)

    def look(number: int, plan: Plan) -> None:
        wholly.append((number, plan))
        if time.process_time() <= until:
            best = _best_of(plan, inputs)
            if explore_stages(inputs.training, [sets[number]], inputs.choices, best, QUICK, until):
                tried.add(number)
            kept.add(best.plans)

    first = _fastest_first(kept, sets)
    for place, (number, plan) in enumerate(first):
        if place == 0 or plan.training.parallel.pipeline <= MOST_STAGES:
            room -= gpus_of(sets[number])
            look_near(number, plan)
    known = _fastest_first(kept, sets)
    for number, plan in [*known[:1], *sorted(known[1:], key=lambda one: (one[0] > 0, gpus_of(sets[one[0]])))]:
        if NEAR * gpus_of(sets[number]) <= room:
            room -= NEAR * gpus_of(sets[number])
            look(number, plan)
    for number, plan in first[:1]:  # a search begins from that plan, and may find another one than from what is near
        if all(plan is not one for _, one in wholly):
            look(number, plan)
    for number, plan in on_sets(kept.plans, sets):
        if number in climbs and number not in dict(wholly) and not plan.training.parallel.alike:
            best = _best_of(plan, inputs)
            go_on(climbs[number], best)
            kept.add(best.plans)
    return len({*climbs, *tried})


def _best_of(plan: Plan, inputs: Inputs) -> Best:
    best = Best(1, inputs.fault)
    best.add([plan])
    return best


def _fastest_first(kept: Front, sets: Sequence[Sequence[NodeKind]]) -> list[tuple[int, Plan]]:
    """List the sets of nodes of a front's plans by their numbers, with a plan to beat: that of the fastest plan, that
    of all nodes, and those of the others."""
    known = on_sets(kept.plans, sets)
    return [*dict([*known[:1], *((0, plan) for _, plan in known[:1]), *known]).items()]


def _front_relieved(
    inputs: Inputs,
    asked: Inputs,
    every: Sequence[Sequence[Space]],
    kept: Front,
    known: list[Plan],
    until: float,
) -> None:
    """Adds plans whose stages keep only what they need, of those that are kept and not `known`, and of the sizes in
    `every` space: on the nodes of the fastest plan first, and then on the sets with the fewest GPUs, which have the
    least room, until there are some on enough sets, or none on some in a row."""
    found = in_vain = 0
    by_nodes = by_set(every)
    sets = [spaces[0].kinds for spaces in by_nodes]
    fastest = [number for number, _ in on_sets(kept.plans[:1], sets)]
    fewest_first = sorted(range(len(sets)), key=lambda number: gpus_of(sets[number]))
    for number in dict.fromkeys([*fastest, *fewest_first]):
        if time.process_time() > until or in_vain == LULL or found == RELIEVED:
            break
        plans = [
            plan for at, plan in on_sets(kept.plans, sets) if at == number and all(plan is not one for one in known)
        ]
        known += plans
        relief = relieved_plans(inputs, asked, plans, kept.slowest(sets[number]), by_nodes[number], until)
        found, in_vain = (found + 1, 0) if relief else (found, in_vain + 1)
        kept.add(relief)
