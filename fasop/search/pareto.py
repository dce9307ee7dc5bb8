"""Time against cost: the plans of which no other one, on whatever nodes of the cluster, is both faster and cheaper.

An iteration costs its time, at the price of the nodes that the plan uses; so fewer nodes that wait less cost less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conf.visible import plural
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from fasop.errors import SearchError
from fasop.search.plan import DAY, HOUR, Plan, Run, by_time, price_per_hour, step_cost


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of a whole training; US dollars and days."""

    cost: float = math.inf
    days: float = math.inf


class Front:
    """Keeps the plans that nothing beats, the fastest first, of those within the limits."""

    def __init__(self, run: Run, limits: Limits) -> None:
        self._slowest = limits.days * DAY / run.iterations
        self._dearest = limits.cost / run.iterations
        self.plans: list[Plan] = []

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        price = price_per_hour([kind for kind in kinds for _ in range(kind.group.count)])
        assert price is not None
        costs = bounds * price / HOUR
        return (bounds <= self._slowest) & (costs <= self._dearest) & (costs < self._cheapest_within(bounds))

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        """Always: so it has what a search on these nodes alone finds."""
        return True

    def _cheapest_within(self, seconds: Floats) -> Floats:
        """The least cost of an iteration that a plan on the front has and that takes no longer; infinite if none."""
        times = np.array([plan.total for plan in self.plans])
        costs = np.array([math.inf, *map(step_cost, self.plans)])
        cheapest: Floats = costs[np.searchsorted(times, seconds, side="right")]
        return cheapest

    def add(self, plans: Sequence[Plan]) -> None:
        within = [plan for plan in plans if plan.total <= self._slowest and step_cost(plan) <= self._dearest]
        kept: list[Plan] = []
        for plan in sorted([*self.plans, *within], key=lambda one: (one.total, step_cost(one), by_time(one))):
            if not kept or step_cost(plan) < step_cost(kept[-1]):
                kept.append(plan)
        self.plans = kept


def nothing_within(front: Sequence[Plan], run: Run, limits: Limits) -> SearchError:
    """What to say of limits that no plan keeps; `front` is that without limits."""
    fastest, cheapest = (
        f"{run.days(p):.3g} days for ${step_cost(p) * run.iterations:.6g}" for p in (front[0], front[-1])
    )
    asked = [f"max_cost={limits.cost:g}"] if math.isfinite(limits.cost) else []
    asked += [f"max_days={limits.days:g}"] if math.isfinite(limits.days) else []
    return SearchError(
        f"no plan for {plural(run.iterations, 'iteration')} meets {' and '.join(asked)}: the cheapest takes "
        f"{cheapest}, the fastest {fastest}; raise the limits, or train less (train.iterations, tokens)"
    )
