"""The plans of which no other one, on whatever nodes of the cluster, is both faster and takes less money or energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conf.visible import plural
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind, has_prices
from fasop.errors import SearchError
from fasop.search.plan import HOUR, Fault, Plan, Run, by_time, no_fault, price_per_hour
from fasop.search.search import GAIN


def kilowatts(nodes: Sequence[NodeKind]) -> float | None:
    """Returns the power of all GPUs of these nodes while they train; None if that of one is not known."""
    watts = [node.gpus * node.gpu.watts for node in nodes if node.gpu.watts is not None]
    return sum(watts) / 1000 if len(watts) == len(nodes) else None


@dataclass(frozen=True, kw_only=True)
class Expense:
    """What a training takes besides time: money for its nodes, or energy of its GPUs."""

    what: str
    per_hour: Callable[[Sequence[NodeKind]], float | None]
    """What such nodes take in an hour, in dollars or kWh; None if that of one is not known."""
    unit: str
    """The unit of an amount, in the titles of tables."""
    rate: str
    """The title of what the nodes take in an hour."""
    least: str
    """What the plan is called that takes least."""
    of_traffic: Callable[[Plan], float] = lambda _: 0.0
    """What the messages of an iteration take beside."""

    def of_step(self, plan: Plan, run: Run) -> float | None:
        """Returns what an iteration takes, failures included; None if that of a node is not known."""
        rate = self.per_hour(plan.nodes)
        return None if rate is None else rate * run.seconds(plan) / HOUR + self.of_traffic(plan)

    def known(self, plan: Plan, run: Run) -> float:
        """Returns what `of_step` does, for nodes of which all is known."""
        taken = self.of_step(plan, run)
        assert taken is not None
        return taken

    def text(self, amount: float, form: str) -> str:
        """Writes an amount, such as $5.20 or 31.5 kWh."""
        return f"${amount:{form}}" if self.unit == "$" else f"{amount:{form}} {self.unit}"


def _dollars_per_step(plan: Plan) -> float:
    if not has_prices(plan.nodes):
        return 0.0
    from fasop.search.traffic import dollars_per_step  # few clusters pay for bytes

    return dollars_per_step(plan)


COST = Expense(
    what="cost",
    per_hour=price_per_hour,
    unit="$",
    rate="$/hour",
    least="cheapest",
    of_traffic=_dollars_per_step,
)
ENERGY = Expense(what="energy", per_hour=kilowatts, unit="kWh", rate="kW", least="most frugal")


def check_known(kinds: Sequence[NodeKind], expense: Expense) -> None:
    """Raises SearchError if there is a group of which the expense is not known."""
    without = [kind for kind in kinds if expense.per_hour([kind]) is None]
    if not without:
        return
    if expense is ENERGY:
        keys = [*dict.fromkeys(f"cluster.gpus.{kind.group.gpu}" for kind in without)]
        needs, example = "pareto=energy needs the power of every GPU", "watts=150, for example, in watts per GPU"
    else:
        keys = [f"cluster.groups.{kind.name}" for kind in without]
        needs, example = (
            "pareto needs the price of every node",
            "price_per_hour=8.1, for example, in US dollars per node",
        )
    raise SearchError(
        f"{needs}: {', '.join(keys)} {'has' if len(keys) == 1 else 'have'} none; give {keys[0]}.{example}"
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a whole training, in days and in the unit of the front's expense."""

    cost: float = math.inf
    days: float = math.inf

    def keep(self, front: Sequence[Plan], run: Run, expense: Expense) -> list[Plan]:
        """List the plans of a front within them: nothing beats these, since what would is within them, too."""
        steps = run.iterations
        affordable = [plan for plan in front if expense.known(plan, run) * steps <= self.cost]
        return [plan for plan in affordable if run.days(plan) <= self.days]


class Front:
    """Keeps the plans that nothing beats, the fastest first."""

    def __init__(self, run: Run, fault: Fault = no_fault, expense: Expense = COST) -> None:
        self._run = run
        self._fault = fault
        self._expense = expense
        self.plans: list[Plan] = []
        self._times, self._costs = np.zeros(0), np.full(1, math.inf)
        """Seconds of the plans, failures included, and what they take; the latter behind an infinite one."""
        self._rates: dict[tuple[tuple[str, int], ...], tuple[list[NodeKind], float]] = {}
        """The nodes of each set that was asked for, by kinds and numbers, and what they take in an hour."""

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        key = tuple((kind.name, kind.group.count) for kind in kinds)
        if key not in self._rates:
            nodes = [kind for kind in kinds for _ in range(kind.group.count)]
            rate = self._expense.per_hour(nodes)
            assert rate is not None
            self._rates[key] = nodes, rate
        nodes, rate = self._rates[key]
        seconds = self._run.expected(nodes, bounds)
        return np.asarray(seconds * rate / HOUR < self._cheapest_within(seconds))

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        return bool(self.worth(kinds, np.array([GAIN * seconds]))[0])

    def slowest(self, kinds: Sequence[NodeKind]) -> float:
        """Returns the seconds below which a plan on these nodes is worth its cost, to a thousandth; 0 if none is."""
        seconds = np.exp(np.arange(-7, 7, 1e-3)) * float(self._times[-1])
        return float(max(seconds[self.worth(kinds, seconds)], default=0.0))

    def _cheapest_within(self, seconds: Floats) -> Floats:
        """The least expense of an iteration that a plan on the front has and that takes no longer; infinite if none."""
        return self._costs[np.searchsorted(self._times, seconds, side="right")]

    def add(self, plans: Sequence[Plan]) -> None:
        able = [plan for plan in plans if self._fault(plan) is None]
        others = [(self._run.seconds(plan), self._expense.known(plan, self._run), plan) for plan in able]
        known = zip(self._times.tolist(), self._costs[1:].tolist(), self.plans, strict=True)
        kept: list[tuple[float, float, Plan]] = []
        for one in sorted([*known, *others], key=lambda row: row[:2]):
            if not kept or one[1] < kept[-1][1]:
                kept.append(one)
            elif one[:2] == kept[-1][:2]:
                kept[-1] = min(kept[-1], one, key=lambda row: by_time(row[2]))
        self.plans = [plan for *_, plan in kept]
        self._times = np.array([seconds for seconds, *_ in kept])
        self._costs = np.array([math.inf, *(cost for _, cost, _ in kept)])


def nothing_within(front: Sequence[Plan], run: Run, limits: Limits, expense: Expense) -> SearchError:
    """What to say of limits that no plan keeps; `front` is that without limits."""
    fastest, cheapest = (
        f"{run.days(p):.3g} days for {expense.text(expense.known(p, run) * run.iterations, '.6g')}"
        for p in (front[0], front[-1])
    )
    asked = [f"max_cost={limits.cost:g}"] if math.isfinite(limits.cost) else []
    asked += [f"max_days={limits.days:g}"] if math.isfinite(limits.days) else []
    return SearchError(
        f"no plan for {plural(run.iterations, 'iteration')} meets {' and '.join(asked)}: the {expense.least} takes "
        f"{cheapest}, the fastest {fastest}; raise the limits, or train less (train.iterations, tokens)"
    )
