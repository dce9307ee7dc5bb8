"""`pack=true`: the runs of a sweep share the cluster, each with the best plan for some of its nodes, so that the last
one ends as early as possible. With `pack=cost` each one trains where it costs least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from conf.compose import compose_unchecked
from conf.errors import TdppError
from conf.schema.executor import ExecutorKind
from conf.visible import plural, span
from fasop.search.packing import Packing, Way, in_order, pack, waits_for
from launch.commands.launching.resolve_auto import resolve_auto
from launch.errors import LaunchError
from launch.screen import print_table, remark
from launch.sweep.outcomes import differing
from launch.sweep.start import Combination

if TYPE_CHECKING:
    from fasop.costs.hardware import NodeKind
    from fasop.search.inputs import Inputs
    from fasop.search.plan import Plan
    from launch.commands.launching.excluded import Known

SEARCH_S = 20.0
"""CPU seconds in which the plans for all sets of nodes are searched, of all the sweep's trainings together."""
LEAST_S = 3.0
"""The least of these for one training."""
SAME_COST = 1e-6
"""Costs that differ by so little of them are the same."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A sweep whose runs have their plans, and the order of their starts."""

    combinations: list[Combination]
    order: list[int]
    """Numbers of the combinations as they start; what cannot be started is not among them."""
    waits: Mapping[int, Sequence[int]]
    """The combinations whose runs must have ended before that of a combination starts, by its number."""


def packed(
    combinations: Sequence[Combination], folders: Sequence[str], hosts: Known, *, by_cost: bool = False
) -> Packed:
    """Chooses nodes, plan and start of each run, and prints them.

    Args:
        combinations: as composed without a plan of the packing's.
        folders: the words that name folders of configurations.
        hosts: as of `resolve_auto`.
        by_cost: whether each run is to cost as little as it can; the last one then ends as early as that allows.

    Raises:
        LaunchError: runs are not those of one Slurm cluster, the length of one is not known, or with `by_cost` the
            price of a node.
    """
    inputs: dict[int, Inputs] = {}
    failed: dict[int, TdppError] = {}
    for number, combination in enumerate(combinations):
        try:
            inputs[number] = _read([*folders, *combination.overrides])
        except LaunchError:
            raise
        except TdppError as error:
            failed[number] = error
    nodes = _nodes(list(inputs.values()))
    plans = _plans(inputs, failed)
    made = [replace(one, composed=failed[n]) if n in failed else one for n, one in enumerate(combinations)]
    order, waits = list[int](), dict[int, Sequence[int]]()
    if plans:
        numbers = [*plans]
        ways = [[_way(plan, inputs[number]) for plan in plans[number]] for number in numbers]
        found = soonest = pack(ways, [*nodes.values()])
        prices = _prices(inputs[numbers[0]].kinds) if by_cost else None
        if prices is not None:
            found = pack([_cheapest(of_run, prices) for of_run in ways], [*nodes.values()])
        chosen = [plans[n][ways[i].index(found.slots[i].way)] for i, n in enumerate(numbers)]
        for number, plan in zip(numbers, chosen, strict=True):
            from fasop.tables.plans import launch_words

            (words,) = launch_words([*folders, *combinations[number].overrides], [plan], {})
            made[number] = _composed(tuple(word for word in words if word not in folders), folders, hosts)
        order = [numbers[run] for run in in_order(found)]
        for number, before in zip(numbers, waits_for(found, [*nodes.values()]), strict=True):
            waits[number] = [numbers[run] for run in before]
        names = differing([one.overrides for one in combinations])
        _show(found, [names[number] for number in numbers], [*nodes])
        alone = sum(min(way.seconds for way in of_run) for of_run in ways)
        said = _gain(found, alone) if prices is None else _saving(found, soonest, prices)
        remark(said)
    return Packed(combinations=made, order=order, waits=waits)


def with_words(
    combinations: Sequence[Combination], words: Sequence[Sequence[str]], folders: Sequence[str], hosts: Known
) -> list[Combination]:
    """The combinations of a sweep that was packed before, with the plans that they got then. Raises LaunchError: the
    sweep had other combinations."""
    if len(words) != len(combinations):
        raise LaunchError(
            f"resume= packs nothing anew: {plural(len(words), 'combination')} had been packed, and now there are "
            f"{len(combinations)}; start the sweep again with skip_existing=true"
        )
    return [_composed(tuple(own), folders, hosts) for own in words]


def _read(words: Sequence[str]) -> Inputs:
    from fasop.search.inputs import read

    inputs = read(words)
    if inputs.executor.kind is not ExecutorKind.slurm:
        raise LaunchError("pack=true has Slurm start the runs side by side: add executor=slurm, or leave it out")
    if inputs.run.iterations <= 1 and not inputs.run.known:
        raise LaunchError(
            "pack=true needs the length of each run before its data are read: give train.iterations=N or "
            "train.samples=N instead of train.epochs"
        )
    return inputs


def _nodes(inputs: Sequence[Inputs]) -> dict[str, int]:
    """The nodes of the cluster, by group."""
    found = [{kind.name: kind.group.count for kind in one.kinds} for one in inputs]
    if any(one != found[0] for one in found):
        raise LaunchError("pack=true packs runs on one cluster, and these have several; give cluster= one value")
    return found[0] if found else {}


def _plans(inputs: Mapping[int, Inputs], failed: dict[int, TdppError]) -> dict[int, list[Plan]]:
    """The fastest plan for each set of nodes, by the number of the combination; notes where there is none.

    Combinations that train the same are searched once.
    """
    from fasop.search.best_of_sets import best_of_sets
    from fasop.search.findings.no_plan import why_no_plan
    from fasop.search.space.node_sets import clusters

    alike: dict[str, list[int]] = {}
    for number, one in inputs.items():
        alike.setdefault(repr((one.training, one.choices, one.cluster)), []).append(number)
    seconds = max(LEAST_S, SEARCH_S / max(1, len(alike)))
    found: dict[int, list[Plan]] = {}
    for numbers in alike.values():
        one = inputs[numbers[0]]
        if plans := best_of_sets(one, clusters(one.kinds), seconds):
            found |= dict.fromkeys(numbers, plans)
        else:
            failed |= dict.fromkeys(numbers, why_no_plan(one.training, one.kinds, one.choices))
    return {number: found[number] for number in inputs if number in found}


def _way(plan: Plan, inputs: Inputs) -> Way:
    from fasop.search.traffic import dollars_per_step

    used = Counter(node.name for node in plan.nodes)
    counts, iterations = tuple(used[kind.name] for kind in inputs.kinds), inputs.run.iterations
    return Way(nodes=counts, seconds=plan.total * iterations, traffic=dollars_per_step(plan) * iterations)


def _prices(kinds: Sequence[NodeKind]) -> list[float]:
    """US dollars a second of a node, by group."""
    from fasop.search.plan import HOUR

    if unpriced := [kind.name for kind in kinds if kind.group.price_per_hour is None]:
        raise LaunchError(
            f"pack=cost needs the price of every node: give cluster.groups.{unpriced[0]}.price_per_hour, in US dollars "
            "per node, or use pack=true"
        )
    return [(kind.group.price_per_hour or 0.0) / HOUR for kind in kinds]


def _cost(way: Way, prices: Sequence[float]) -> float:
    """US dollars of the nodes, and of what they send between groups where that has a price."""
    return way.traffic + way.seconds * sum(count * price for count, price in zip(way.nodes, prices, strict=True))


def _cheapest(ways: Sequence[Way], prices: Sequence[float]) -> list[Way]:
    """The ways that cost least, and those that cost hardly more."""
    most = min(_cost(way, prices) for way in ways) * (1 + SAME_COST)
    return [way for way in ways if _cost(way, prices) <= most]


def _composed(overrides: tuple[str, ...], folders: Sequence[str], hosts: Known) -> Combination:
    try:
        cfg = compose_unchecked([*folders, *overrides])
        composed, chosen = resolve_auto(cfg, overrides, hosts)
    except TdppError as error:
        return Combination(overrides=overrides, composed=error)
    return Combination(overrides=overrides, composed=composed, chosen=chosen)


def _show(found: Packing, names: Sequence[str], groups: Sequence[str]) -> None:
    rows = []
    for number, run in enumerate(in_order(found), 1):
        slot = found.slots[run]
        counts = zip(groups, slot.way.nodes, strict=True)
        nodes = "+".join(f"{name}*{count}" if count > 1 else name for name, count in counts if count)
        rows.append([str(number), names[run], nodes, *(span(s, 3) for s in (slot.start, slot.way.seconds, slot.end))])
    print_table(["run", "overrides", "nodes", "starts after", "trains", "ends after"], rows)


def _saving(found: Packing, soonest: Packing, prices: Sequence[float]) -> str:
    """What the runs cost where each one costs least, and beside the packing that ends soonest, in words."""
    cost, other = (sum(_cost(slot.way, prices) for slot in one.slots) for one in (found, soonest))
    less = f"{1 - cost / other:.0%} less" if other > cost else "as much"
    return (
        f"pack=cost: by the prediction the {plural(len(found.slots), 'run')} cost ${cost:,.2f}, {less} than with "
        f"pack=true (${other:,.2f}); the last one has trained after {span(found.seconds, 3)} instead of "
        f"{span(soonest.seconds, 3)}"
    )


def _gain(found: Packing, alone: float) -> str:
    """What the packing gains over one run after another, each on the nodes on which it is fastest, in words."""
    sooner = 1 - found.seconds / alone
    gain = f"{sooner:.0%} sooner than" if sooner > 0 else "as late as"
    gap = 1 - found.bound / found.seconds
    proof = "no packing of these plans ends sooner" if gap < 5e-4 else f"another packing ends at most {gap:.1%} sooner"
    return (
        f"pack=true: by the prediction the last of {plural(len(found.slots), 'run')} has trained after "
        f"{span(found.seconds, 3)}, {gain} one after another, each on the nodes where it is fastest "
        f"({span(alone, 3)}); proved: {proof}"
    )
