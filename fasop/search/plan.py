"""A plan that a search has found, in which order plans come, and what nodes, iterations and trainings cost.

An iteration costs its time, at the price of the nodes that the plan uses; so fewer nodes that wait less cost less.
Failures of nodes and saves make a training really take more days and dollars, on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from conf.schema.cluster import Cluster
from conf.schema.parallel import Parallel
from conf.schema.train import Train
from conf.schema.values.partition import NodeOrder
from conf.visible import span
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import Basis
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.simulation.loaded import Parts
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.parallel_config import RECOMPUTES, Schedule
from megatron_ext.contract.reliability import DAY_S, USUAL_DAYS, best_interval_s, expected_s
from megatron_ext.contract.train_config import AUTO

HOUR, DAY = 3600.0, 86400.0
MOMENT_S = 1e-3
"""Less than an iteration takes."""


@dataclass(frozen=True, kw_only=True)
class Plan(PlacedTraining):
    """A plan, and what is predicted of it; times are seconds. Its `parallel` has partition and node order, too."""

    total: float
    """An iteration, once the first one is over."""
    known_parts: Parts | None = None
    """`parts`, where the search found them beside the time."""
    bound: float
    """Proved: no partition of these sizes and nodes that fits takes less."""
    basis: Basis
    pipelines: Pipelines | None
    """What its stages take; one pipeline. None where stages differ, or shares by more than one."""

    @cached_property
    def parts(self) -> Parts:
        """Return where the time goes; arrays of one."""
        if self.known_parts is not None:
            return self.known_parts
        from fasop.simulation.predict import predict_plan  # those of a search are known

        return predict_plan(self).parts

    @cached_property
    def parallel(self) -> Parallel:
        """Return the plan as a configuration has it, for those who show or launch it."""
        return self.training.parallel.configured()

    @property
    def gap(self) -> float:
        """How much less than `total` another partition could take at most, as a part of it: 0 of a single stage."""
        return 1 - self.bound / self.total if len(self.partition.layers) > 1 else 0.0


Fault = Callable[[Plan], str | None]
"""Why what is to run a plan cannot; None: it can."""


def no_fault(plan: Plan) -> None:
    """Returns None: tdpp can run every plan that it finds."""


def by_time(plan: Plan) -> tuple[float, tuple[object, ...]]:
    """Orders plans; of equally fast ones first those on fewer GPUs, and then those that use less of everything that
    makes a plan complicated.
    """
    p = plan.training.parallel
    again = sum(way.layers or 0 for way in p.recompute.stages)
    options = (RECOMPUTES.index(p.recompute.way), again, p.sharded_optimizer, p.sequence_parallel)
    schedule = (list(Schedule).index(p.schedule), p.chunks)
    sizes = (p.tensor_size, p.data, p.pipeline, p.expert, p.context, p.micro_batch_size)
    return plan.total, (
        p.world_size,
        *options,
        *schedule,
        *sizes,
        str(NodeOrder(p.node_order or ())),
        str(plan.partition),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole training."""

    iterations: int
    known: bool = True
    """False: nobody has said how long it is. A configuration's own iterations may be just enough to time a plan, so
    neither its days nor its dollars are known."""
    failures: Failures | None = None
    """What nodes that fail take, where somebody said how often they do."""

    def of_tokens(self, tokens: float, global_batch_size: int, sequence_length: int) -> Run:
        """Make it one of the iterations that so many tokens take."""
        return replace(self, iterations=math.ceil(tokens / (global_batch_size * sequence_length)), known=True)

    def expected(self, nodes: Sequence[NodeKind], seconds: Floats) -> Floats:
        """[n], of iterations of so many `seconds` on these nodes: what they take on average, failures included."""
        return seconds if self.failures is None else self.failures.expected(nodes, seconds, self.length)

    @property
    def length(self) -> int | None:
        """Return its iterations where they are known."""
        return self.iterations if self.known else None

    def seconds(self, plan: Plan) -> float:
        """Return what an iteration of a plan takes on average, failures included."""
        return float(self.expected(plan.nodes, np.array([plan.total]))[0])

    def lost(self, plan: Plan) -> float | None:
        """Return the part of the time that failures take; None where nobody said how often nodes fail."""
        return None if self.failures is None else 1 - plan.total / self.seconds(plan)

    def days(self, plan: Plan) -> float:
        return self.iterations * self.seconds(plan) / DAY


def price_per_hour(nodes: Sequence[NodeKind]) -> float | None:
    """US dollars, of these nodes; None if that of one is not known."""
    prices = [node.group.price_per_hour for node in nodes]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


@dataclass(frozen=True, kw_only=True)
class Failures:
    save_s: float
    """What a save takes, and reading it."""
    restart_s: float
    every: float | None
    """Iterations between two saves; infinite: there is none before the end; None: as a run chooses by itself."""

    @classmethod
    def of(cls, cluster: Cluster, train: Train, parameters: int) -> Failures | None:
        """None where no group says how often its nodes fail."""
        if all(group.failures_per_day is None for group in cluster.groups.values()):
            return None
        every = train.save_interval if train.checkpoint else None
        return cls(
            save_s=train.checkpoint * train.checkpoint_bytes(parameters) / (cluster.checkpoint_gb_per_s * 1e9),
            restart_s=cluster.restart_s,
            every=math.inf if every is None else every if isinstance(every, int) else None,
        )

    def expected(self, nodes: Sequence[NodeKind], seconds: Floats, iterations: int | None) -> Floats:
        """[n], of iterations of so many `seconds` each on these nodes: what they take on average, in a training of so
        many, or in a long one. It grows with `seconds`.

        A training ends with a save, so that the work behind the last interval, which may be the only one, is shorter.
        """
        mtbf_s = mtbf(nodes)
        if self.every is None:  # the same part of any iteration
            if math.isinf(mtbf_s):
                return seconds
            best = best_interval_s(self.save_s, mtbf_s)
            return seconds * (self._taken(best, mtbf_s) / best)
        every = self.every if iterations is None else min(self.every, iterations)
        if math.isinf(every):
            return seconds if math.isinf(mtbf_s) else np.full(seconds.shape, math.inf)
        total = every if iterations is None else iterations
        intervals, rest = divmod(total, every)
        taken = np.array([self._taken(one, mtbf_s) for one in (every * seconds).tolist()]) * intervals
        if rest:
            taken += [self._taken(one, mtbf_s) for one in (rest * seconds).tolist()]
        return taken / total

    def _taken(self, work_s: float, mtbf_s: float) -> float:
        return expected_s(work_s, self.save_s, self.restart_s + self.save_s, mtbf_s)

    def check(self, kinds: Sequence[NodeKind], iterations: int | None) -> None:
        """Raise SearchError if nodes fail so often that no plan on any of them ever reaches a save, or if there is only
        one at the end of a training of unknown length."""
        if self.every == math.inf and iterations is None:
            key = (
                "train.save_interval=null saves only at the end"
                if self.save_s
                else "train.checkpoint=false never saves"
            )
            raise SearchError(
                f"{key}, so that what is lost to failures depends on the whole training; give its length with tokens=N "
                "or train.iterations=N, or use train.save_interval=auto"
            )
        if kinds and all(math.isinf(self.expected([kind], np.array([MOMENT_S]), iterations)[0]) for kind in kinds):
            least = max(kinds, key=lambda kind: mtbf([kind]))
            raise SearchError(
                f"cluster.groups.{least.name}.failures_per_day={least.group.failures_per_day:g}: a node would fail "
                f"every {span(mtbf([least]), 2)}, so that no run ever reaches a save; give how often one of them does "
                "in a day"
            )

    def said(self, nodes: Sequence[NodeKind], seconds: float, iterations: int | None) -> str:
        """In words, for so many iterations of `seconds` on these nodes."""
        mtbf_s = mtbf(nodes)
        means = "Days and amounts are what is to be expected with failures (cluster.groups.<group>.failures_per_day)"
        if math.isinf(mtbf_s):
            return f"{means}: of the first plan, no node fails."
        if not self.save_s:
            return (
                f"{means}: of the first plan, one of the nodes fails every {span(mtbf_s, 2)}, and the training starts "
                "anew (train.checkpoint=false)."
            )
        if self.every is not None and iterations is not None and self.every >= iterations:
            often = f"the only save (train.save_interval={'null' if math.isinf(self.every) else self.every})"
        else:
            every_s = best_interval_s(self.save_s, mtbf_s) if self.every is None else self.every * seconds
            often = f"a save every {span(every_s, 2)} (train.save_interval={self.every or AUTO})"
        return (
            f"{means}: of the first plan, one of the nodes fails every {span(mtbf_s, 2)}, {often} takes "
            f"{self.save_s:.3g} s, and a start {self.restart_s:.3g} s and reading the checkpoint."
        )


def mtbf(nodes: Sequence[NodeKind]) -> float:
    """Returns the seconds between two failures of any of these nodes; infinite if none fails."""
    rates = (node.group.failures_per_day for node in nodes)
    a_day = sum(1 / USUAL_DAYS if rate is None else rate for rate in rates)
    return DAY_S / a_day if a_day else math.inf
