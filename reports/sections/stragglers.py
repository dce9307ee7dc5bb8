"""Ranks that compute longer than the others of their stage, and iterations that take longer than usual."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from reports.facts.statistics import Statistics
from reports.facts.terms import ranks_seen
from reports.figures.page import Names, table
from reports.readers.record import Plan, Rank
from reports.sections.plan_section import plural

SLOW_RANK = 1.05
"""Times the median of the other ranks of its stage, from which a rank is a straggler."""
SLOW_ITERATION = 1.5
"""Times the median length, from which an iteration is told."""
MOST = 10


@dataclass(frozen=True, kw_only=True)
class Straggler:
    rank: Rank
    compute_ms: float
    usual_ms: float
    """Of the other ranks of its stage, their median."""

    @property
    def more(self) -> float:
        return self.compute_ms / self.usual_ms - 1


def stragglers(figures: Statistics, plan: Plan) -> list[Straggler]:
    """The slowest first. Ranks of a stage have the same work, so that their computing times can be compared."""
    if not figures.steady.any():
        return []
    usual = np.median(figures.spent.compute[:, figures.steady], axis=1)
    found = []
    for stage in range(plan.pipeline):
        ranks = [plan.ranks[rank] for rank in ranks_seen(figures, plan, stage)]
        for rank in ranks if len(ranks) > 1 else ():
            others = float(np.median([usual[other.rank] for other in ranks if other is not rank]))
            if usual[rank.rank] > SLOW_RANK * others > 0:
                found.append(Straggler(rank=rank, compute_ms=float(usual[rank.rank]), usual_ms=others))
    return sorted(found, key=lambda one: -one.more)


def stragglers_section(figures: Statistics, plan: Plan) -> str:
    """The section of a run's page, as HTML; nothing without a steady iteration."""
    if not figures.steady.any():
        return ""
    found = stragglers(figures, plan)
    longer = f"over {SLOW_RANK - 1:.0%} longer than the others of {'their' if len(found) > 1 else 'its'} stage"
    if plan.data * plan.tensor == 1:
        said = "Every stage has one rank: there is no other to compare it with."
    elif found:
        said = f"{plural(len(found), 'rank')} of {len(plan.ranks)} computed {longer}."
    else:
        said = f"No rank computed {longer}."
    rows = [
        (
            str(one.rank.rank),
            Names([one.rank.node]),
            str(one.rank.stage),
            f"{one.compute_ms:,.1f}",
            f"{one.usual_ms:,.1f}",
            f"{one.more:+.1%}",
        )
        for one in found[:MOST]
    ]
    ranks = table(("rank", "node", "stage", "compute ms", "others ms", "more"), rows) if rows else ""
    return f"<section><h2>Stragglers</h2><p>{escape(said)}</p>{ranks}<p>{escape(_iterations(figures))}</p></section>"


def _iterations(figures: Statistics) -> str:
    lengths = figures.length_ns[figures.steady]
    limit = SLOW_ITERATION * float(np.median(lengths))
    slow = [int(number) for number in figures.iterations[figures.steady][lengths > limit]]
    if not slow:
        return f"No iteration after the first took over {SLOW_ITERATION:g} times the median."
    named = ", ".join(map(str, slow[:MOST])) + (f" and {len(slow) - MOST:,} more" if len(slow) > MOST else "")
    return f"{plural(len(slow), 'iteration')} took over {SLOW_ITERATION:g} times the median: {named}."
