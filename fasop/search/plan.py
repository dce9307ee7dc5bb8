"""A plan that a search has found, in which order plans come, and what nodes, iterations and trainings cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema.experiment import Parallel, Recompute, Schedule
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import Basis
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.simulation.loaded import Parts
from fasop.simulation.pipelines import Pipelines

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, kw_only=True)
class Plan(PlacedTraining):
    """A plan, and what is predicted of it; times are seconds. Its `parallel` has partition and node order, too."""

    total: float
    """An iteration, once the first one is over."""
    parts: Parts
    """Where the time goes; arrays of one."""
    bound: float
    """Proved: no partition of these sizes and nodes that fits takes less."""
    basis: Basis
    pipelines: Pipelines | None
    """What its stages take; one pipeline. None where stages differ, or shares by more than one."""

    @property
    def parallel(self) -> Parallel:
        return self.training.parallel

    @property
    def gap(self) -> float:
        """How much less than `total` another partition could take at most, as a part of it: 0 of a single stage."""
        return 1 - self.bound / self.total if len(self.partition.layers) > 1 else 0.0


def by_time(plan: Plan) -> tuple[float, tuple[object, ...]]:
    """Orders plans; of equally fast ones first those on fewer GPUs, and then those that use less of everything that
    makes a plan complicated.
    """
    p = plan.parallel
    options = (list(Recompute).index(p.recompute), p.sharded_optimizer, p.sequence_parallel)
    schedule = (list(Schedule).index(p.schedule), p.chunks)
    sizes = (p.tensor_size, p.data, p.pipeline, p.micro_batch_size)
    return plan.total, (p.world_size, *options, *schedule, *sizes, p.node_order, p.partition)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole training."""

    iterations: int
    known: bool = True
    """False: nobody has said how long it is. A configuration's own iterations may be just enough to time a plan, so
    neither its days nor its dollars are known."""

    @classmethod
    def of_tokens(cls, tokens: float, global_batch_size: int, sequence_length: int) -> Run:
        """Of the iterations that so many tokens take."""
        return cls(iterations=math.ceil(tokens / (global_batch_size * sequence_length)))

    def days(self, plan: Plan) -> float:
        return self.iterations * plan.total / DAY

    def cost(self, plan: Plan) -> float | None:
        """US dollars; None if the price of a node is not known."""
        step = cost_of_step(plan)
        return None if step is None else self.iterations * step


def price_per_hour(nodes: Sequence[NodeKind]) -> float | None:
    """US dollars, of these nodes; None if that of one is not known."""
    prices = [node.group.price_per_hour for node in nodes]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def cost_of_step(plan: Plan) -> float | None:
    """US dollars of an iteration."""
    price = price_per_hour(plan.nodes)
    return None if price is None else price * plan.total / HOUR


def step_cost(plan: Plan) -> float:
    """As `cost_of_step`, of nodes whose prices are known."""
    cost = cost_of_step(plan)
    assert cost is not None
    return cost


def check_prices(kinds: Sequence[NodeKind]) -> None:
    """Raises SearchError if there is a group without a price."""
    without = [kind.name for kind in kinds if kind.group.price_per_hour is None]
    if without:
        groups = [f"cluster.groups.{name}" for name in without]
        raise SearchError(
            f"pareto needs the price of every node: {', '.join(groups)} {'has' if len(groups) == 1 else 'have'} none; "
            f"give {groups[0]}.price_per_hour=8.1, for example, in US dollars per node"
        )
