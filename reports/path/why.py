"""Why a typical iteration of a run takes as long as it does: all that `reports/path` finds, for its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from fasop.search.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.statistics import Statistics
from reports.path.changes import Gain, gains
from reports.path.critical import Segment, critical_path
from reports.path.idle import idle_frame
from reports.path.making import make_graph
from reports.readers.events import Timeline


@dataclass(frozen=True, kw_only=True)
class Why:
    """Of the steady iteration of median length."""

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
    timeline: Timeline, plan: Plan, figures: Statistics, searched: Sequence[FoundPlan] | None = None
) -> Why | Unexplained | None:
    """Of a run that has a steady iteration of some length; None without one.

    Args:
        searched: what a search found for its GPUs, if there was one.
    """
    recorded_ms, middle = figures.usual_period_ms, figures.middle
    if not recorded_ms or middle is None:
        return None
    if plan.stream is not None:
        return Unexplained("Without a flush iterations go on beside each other: none has a critical path of its own.")
    iteration = int(figures.iterations[middle])
    try:
        graph = make_graph(timeline, plan.ranks, iteration)
    except ReportError as error:
        return Unexplained(f"No critical path: {error}.")
    return Why(
        iteration=iteration,
        path=critical_path(graph),
        gains=gains(graph, plan, searched or ()),
        idle=idle_frame(graph, plan),
        replayed_ms=graph.period_ns() / 1e6,
        recorded_ms=recorded_ms,
        absent=[place.rank for place in plan.ranks if place.rank not in graph.last],
        searched=searched is not None,
    )
