"""What got slower from one run to another: milliseconds of an iteration by stage and kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.contract.plan import Plan
from reports.facts.breakdown import BACKWARD, FORWARD, LOSS, holder
from reports.facts.statistics import Statistics
from reports.facts.terms import measured, ranks_seen
from reports.readers.events import Timeline

KINDS = ("forward", "backward", "messages", "all-reduce", "tensor group", "optimizer", "data", "idle", "other")
"""Idle is waiting for another rank, of whatever stage; other is what no event fills. Together they are an iteration."""
DATA = "batch-generator"
SMALL = 0.005
"""Of an iteration: runs that are closer than this are called as fast as each other."""
NAMED = 0.05
"""Of the whole difference: from here a change is named as one of its causes."""
MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual iteration of a run: medians over steady iterations, and over the ranks of a stage."""

    iteration_ms: float
    stages: Mapping[int, Mapping[str, float]]
    """By stage and kind (KINDS), ms; of a stage they add up to the iteration."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Of one kind in one stage, ms an iteration; stage None is the mean of all stages."""

    stage: int | None
    kind: str
    before: float
    after: float

    @property
    def more(self) -> float:
        return self.after - self.before


def usual(timeline: Timeline, figures: Statistics, plan: Plan) -> Usual | None:
    """None for a run that has no steady iteration."""
    period_ms = figures.usual_period_ms
    if period_ms is None:
        return None
    stages = {}
    for stage, terms in measured(figures, plan, period_ms).items():
        data_ms = _data_ms(timeline, figures, ranks_seen(figures, plan, stage))
        stages[stage] = {
            "forward": terms.forward,
            "backward": terms.backward,
            "messages": terms.messages,
            "all-reduce": terms.all_reduce,
            "tensor group": terms.tensor,
            "optimizer": terms.optimizer,
            "data": data_ms,
            "idle": terms.bubble + terms.imbalance,
            "other": terms.other - data_ms,
        }
    return Usual(iteration_ms=period_ms, stages=stages)


def _data_ms(timeline: Timeline, figures: Statistics, ranks: Sequence[int]) -> float:
    """Getting batches, outside the passes: the median over these ranks and the steady iterations."""
    events = timeline.events
    loads = np.asarray(events["name"] == DATA)
    alone = loads & (holder(events, loads, np.asarray(events["name"].isin([*FORWARD, *BACKWARD, LOSS]))) < 0)
    some = events[alone]
    lasted = (some["end_ns"] - some["start_ns"]).groupby([some["rank"], some["iteration"]]).sum()
    steady = figures.iterations[figures.steady]
    return float(np.median([lasted.get((rank, number), 0) for rank in ranks for number in steady])) / 1e6


def changes(before: Usual, after: Usual) -> list[Change]:
    """What takes more time first. Runs of different stages are compared by the means over their stages."""
    if before.stages.keys() == after.stages.keys():
        pairs = [(stage, kinds, after.stages[stage]) for stage, kinds in before.stages.items()]
        found = [_change(stage, kind, old[kind], new[kind]) for stage, old, new in pairs for kind in KINDS]
    else:
        found = [_change(None, kind, _mean(before, kind), _mean(after, kind)) for kind in KINDS]
    return sorted((one for one in found if one.before or one.after), key=lambda one: -one.more)


def _change(stage: int | None, kind: str, before: float, after: float) -> Change:
    return Change(stage=stage, kind=kind, before=before, after=after)


def _mean(of: Usual, kind: str) -> float:
    return float(np.mean([kinds[kind] for kinds in of.stages.values()]))


def in_words(before: Usual, after: Usual) -> str:
    """How much slower or faster the second run, B, is than the first, A, and the work that it comes from."""
    a, b = before.iteration_ms, after.iteration_ms
    both = f"{b:,.1f} against {a:,.1f} ms"
    if abs(b - a) < SMALL * a:
        return f"B is as fast as A: {both} an iteration."
    sign, word = (1, "slower") if b > a else (-1, "faster")
    said = f"B is {abs(b - a):,.1f} ms {word} an iteration ({both}, {b / a - 1:+.0%})"
    moved = sorted(changes(before, after), key=lambda one: -sign * one.more)
    least = NAMED * abs(b - a)
    work = [one for one in moved if one.kind not in ("idle", "other") and sign * one.more >= least]
    named = work[:MOST_NAMED] or [one for one in moved if sign * one.more >= least][:1]
    how = "more" if sign > 0 else "less"
    parts = [f"{abs(one.more):,.1f} ms {how} in {_where(one)}" for one in named]
    return f"{said}: {', '.join(parts)}." if parts else f"{said}."


def _where(one: Change) -> str:
    what = {"forward": "forward passes", "backward": "backward passes", "idle": "idle time", "other": "other time"}
    kind = what.get(one.kind, one.kind)
    return kind if one.stage is None else f"stage {one.stage}'s {kind}"
