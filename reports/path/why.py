"""Why a typical iteration of a run takes as long as it does: all that `reports/path` finds, for its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from fasop.search.findings.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.statistics import Statistics
from reports.path.change import Gain
from reports.path.changes import gains, largest
from reports.path.critical import Segment, critical_path
from reports.path.idle import idle_frame
from reports.path.irregular import between_iterations, long_iterations
from reports.path.making import make_graph
from reports.path.shares import other_shares
from reports.path.slow_ranks import Expected
from reports.readers.events import Timeline


@dataclass(frozen=True, kw_only=True)
class Why:
    """Of a usual iteration."""

    iteration: int
    path: Sequence[Segment]
    """First to last; together they are the iteration."""
    gains: Sequence[Gain]
    idle: pd.DataFrame
    """`idle_frame`."""
    replayed_ms: float
    """What each of many such iterations takes, one after another."""
    recorded_ms: float
    """Median over the steady iterations."""
    absent: Sequence[int]
    """Ranks without events in it."""
    streams: bool = False
    """Whether nothing is flushed, so that the path goes over several iterations."""
    searched: bool = False
    """Whether plans of a search are among the changes that were tried."""

    @property
    def length_ms(self) -> float:
        """Of the path."""
        return sum(segment.lasts_ns for segment in self.path) / 1e6


@dataclass(frozen=True)
class Unexplained:
    reason: str
    """A sentence."""


def explain(
    timeline: Timeline,
    plan: Plan,
    figures: Statistics,
    searched: Sequence[FoundPlan] | None = None,
    expected: Expected | None = None,
) -> Why | Unexplained | None:
    """Of a run that has a steady iteration of some length; None without one.

    Args:
        searched: what a search found for its GPUs, if there was one.
        expected: what is predicted of its stages.
    """
    recorded_ms = figures.usual_period_ms
    if not recorded_ms:
        return None
    iteration = int(figures.iterations[figures.usual[0]])
    try:
        graph = make_graph(timeline, plan.ranks, iteration, plan.stream is not None)
    except ReportError as error:
        return Unexplained(f"No critical path: {error}.")
    found = [
        *gains(graph, plan, searched or (), expected),
        *other_shares(timeline, graph, plan),
        *long_iterations(timeline, plan, figures, graph),
        *between_iterations(plan, figures),
    ]
    return Why(
        iteration=iteration,
        path=critical_path(graph),
        gains=largest(found),
        idle=idle_frame(graph, plan),
        replayed_ms=graph.period_ns() / 1e6,
        recorded_ms=recorded_ms,
        absent=[place.rank for place in plan.ranks if place.rank not in graph.last],
        streams=graph.streams,
        searched=searched is not None,
    )
