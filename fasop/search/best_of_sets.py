"""The fastest plan for each of several sets of nodes, such as those that remain after a loss."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan, by_time
from fasop.search.search import GAIN, explore
from fasop.search.space.candidates import Space

NodeCounts = tuple[tuple[str, int], ...]
"""Nodes of each group, by the groups' names."""


class BestOfEach:
    """Keeps the fastest plan of each set of nodes; a plan counts for the nodes that it uses."""

    def __init__(self) -> None:
        self.plans: dict[NodeCounts, Plan] = {}

    def _known(self, kinds: Sequence[NodeKind]) -> float:
        plan = self.plans.get(tuple(sorted((kind.name, kind.group.count) for kind in kinds)))
        return np.inf if plan is None else plan.total

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        return np.asarray(bounds < self._known(kinds))

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        return GAIN * seconds <= self._known(kinds)

    def add(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            used = tuple(sorted(Counter(node.name for node in plan.nodes).items()))
            self.plans[used] = min([plan, *([self.plans[used]] if used in self.plans else [])], key=by_time)


def best_of_sets(inputs: Inputs, sets: Sequence[Sequence[NodeKind]], seconds: float) -> list[Plan]:
    """Searches all sets for so many CPU seconds, one after another, those that come first first.

    Returns at most one plan for each set of nodes, the fastest first. A plan that is slower than one on fewer of its
    nodes is left out, for nobody would take it.
    """
    until = time.process_time() + seconds
    keep, bounds = BestOfEach(), LowerBounds(inputs.kinds)
    for uneven in (False, *(() if inputs.training.equal_only else (True,))):
        for kinds in sets:
            if keep.plans and time.process_time() > until:
                break
            explore([Space(inputs.training, kinds, inputs.choices, bounds, uneven=uneven)], keep, until=until)
    kept: list[Plan] = []
    for plan in sorted(keep.plans.values(), key=by_time):
        own = Counter(node.name for node in plan.nodes)
        if not any(Counter(node.name for node in faster.nodes) <= own for faster in kept):
            kept.append(plan)
    return kept
