"""What got slower from one run to another: milliseconds of an iteration by stage and kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conf.run_folder.iteration_time import IterationTime, within_spread
from conf.visible import plural
from megatron_ext.contract.plan import Plan
from reports.facts.breakdown import BACKWARD, FORWARD, LOSS, holder
from reports.facts.frames import ranks_seen, terms_of
from reports.facts.statistics import Statistics
from reports.readers.events import Timeline

KINDS = ("forward", "backward", "messages", "all-reduce", "tensor group", "optimizer", "data", "idle", "other")
"""Idle is waiting for another rank, of whatever stage; other is what no event fills. Together they are an iteration."""
DATA = "batch-generator"
SMALL = 0.005
"""Runs that differ by less than this part of an iteration are called as fast as each other."""
NAMED = 0.05
"""A change is named as a cause from this part of the whole difference on."""
MOST_NAMED = 3
ALONE = 1.9
"""Times the change of its stage, from which a rank has one of its own. Of two ranks the stage has their mean."""
LIKE = 0.5
"""Others of a stage share a rank's change from this part of it on."""


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual iteration of a run: medians over steady iterations, and over the ranks of a stage."""

    iteration_ms: float
    longer_ms: float
    """How much the mean of the iterations is above that."""
    between_ms: float
    """What passes between two iterations: the mean."""
    stages: Mapping[str, Mapping[str, float]]
    """Milliseconds by stage and kind (KINDS); those of a stage add up to the iteration."""
    ranks: Mapping[int, Mapping[str, float]]
    """The same by rank."""
    stage_of: Mapping[int, str]
    """The stage of each of these ranks."""

    @property
    def mean_ms(self) -> float:
        """From the end of an iteration to the end of the next."""
        return self.iteration_ms + self.longer_ms + self.between_ms


@dataclass(frozen=True, kw_only=True)
class Change:
    """How one kind of work changes in one stage, ms an iteration; stage None is the mean of all stages."""

    stage: str | None
    kind: str
    before: float
    after: float
    rank: int | None = None
    """The one of the stage in which this changes most, where half of the stage do not share it."""
    others: int = 0
    """Ranks of the stage that share it, without this one."""

    @property
    def more(self) -> float:
        return self.after - self.before


def usual(timeline: Timeline, figures: Statistics, plan: Plan) -> Usual | None:
    """None for a run that has no steady iteration."""
    period_ms = figures.usual_period_ms
    if period_ms is None:
        return None
    seen = {stage.name: ranks_seen(figures, stage) for stage in plan.stages}
    data = _data_ms(timeline, figures, plan)
    steady = figures.alike
    return Usual(
        iteration_ms=period_ms,
        longer_ms=float(figures.period_ns[steady].mean()) / 1e6 - period_ms,
        between_ms=float(figures.gap_ns[steady].mean()) / 1e6,
        stages={stage: _kinds(figures, ranks, data, period_ms) for stage, ranks in seen.items() if ranks},
        ranks={rank: _kinds(figures, [rank], data, period_ms) for ranks in seen.values() for rank in ranks},
        stage_of={rank: stage for stage, ranks in seen.items() for rank in ranks},
    )


def _kinds(figures: Statistics, ranks: Sequence[int], data: NDArray[np.float64], period_ms: float) -> dict[str, float]:
    terms = terms_of(figures, ranks, period_ms)
    data_ms = float(np.median(data[list(ranks)]))
    return {
        "forward": terms.forward,
        "backward": terms.backward,
        "messages": terms.messages,
        "all-reduce": terms.all_reduce,
        "tensor group": terms.tensor,
        "optimizer": terms.optimizer,
        "data": data_ms,
        "idle": terms.bubble + terms.imbalance,
        # Medians of the parts may add up to more than the median of the whole.
        "other": max(terms.other - data_ms, 0.0),
    }


def _data_ms(timeline: Timeline, figures: Statistics, plan: Plan) -> NDArray[np.float64]:
    """(ranks, steady iterations) of getting batches, outside the passes."""
    events = timeline.events
    loads = np.asarray(events["name"] == DATA)
    alone = loads & (holder(events, loads, np.asarray(events["name"].isin([*FORWARD, *BACKWARD, LOSS]))) < 0)
    some = events[alone]
    lasted = (some["end_ns"] - some["start_ns"]).groupby([some["rank"], some["iteration"]]).sum()
    steady = figures.iterations[figures.steady]
    ranks = range(len(plan.ranks))
    return np.array([[lasted.get((rank, number), 0) for number in steady] for rank in ranks]) / 1e6


def changes(before: Usual, after: Usual) -> list[Change]:
    """What takes more time first; in a run that got faster, what takes less.

    Runs of different stages are compared by the means over their stages. A rank stands for its stage where its own
    change is not that of most others, and for its work alone: what others wait for is its doing.
    """
    if before.stages.keys() == after.stages.keys():
        pairs = [(stage, kinds, after.stages[stage]) for stage, kinds in before.stages.items()]
        found = [_change(stage, kind, old[kind], new[kind]) for stage, old, new in pairs for kind in KINDS]
        if before.stage_of == after.stage_of:
            alone = [*_of_ranks(before, after)]
            instead = {(one.stage, one.kind) for one in alone}
            found = [*(one for one in found if (one.stage, one.kind) not in instead), *alone]
    else:
        found = [_change(None, kind, _mean(before, kind), _mean(after, kind)) for kind in KINDS]
    sign = -1 if after.iteration_ms < before.iteration_ms else 1
    return sorted((one for one in found if one.before or one.after), key=lambda one: -sign * one.more)


def _of_ranks(before: Usual, after: Usual) -> Iterator[Change]:
    """Yields for each stage and kind of work the rank that changes most, where most others do not share it."""
    for stage in before.stages:
        ranks = [rank for rank, own in before.stage_of.items() if own == stage]
        for kind in KINDS:
            more = {rank: after.ranks[rank][kind] - before.ranks[rank][kind] for rank in ranks}
            most = max(more, key=lambda rank: abs(more[rank]))
            usual = after.stages[stage][kind] - before.stages[stage][kind]
            if kind not in ("idle", "other") and len(ranks) > 1 and abs(more[most]) > ALONE * abs(usual):
                yield Change(
                    stage=stage,
                    kind=kind,
                    before=before.ranks[most][kind],
                    after=after.ranks[most][kind],
                    rank=most,
                    others=sum(one / more[most] >= LIKE for one in more.values()) - 1,
                )


def _change(stage: str | None, kind: str, before: float, after: float) -> Change:
    return Change(stage=stage, kind=kind, before=before, after=after)


def _mean(of: Usual, kind: str) -> float:
    return float(np.mean([kinds[kind] for kinds in of.stages.values()]))


def in_words(before: Usual, after: Usual, logged: tuple[IterationTime, IterationTime] | None = None) -> str:
    """How much slower or faster the second run, B, is than the first, A, and the work that it comes from. `logged`:
    their iteration times; None where these cannot be compared."""
    noise = 0.0
    if logged is not None:
        a, b = (time.spread for time in logged)
        if within_spread(a, b):
            both = f"{_times(*logged)} {logged[0].unit}"
            return f"The difference between A and B is within the spread of their iterations: {both}."
        noise = 0.0 if logged[0].per_sample else a.half + b.half
    usual = _usual_in_words(before, after, logged)
    mean, median = after.mean_ms - before.mean_ms, after.iteration_ms - before.iteration_ms
    if abs(mean - median) < max(SMALL * before.mean_ms, noise):
        return usual
    parts = [
        f"{abs(more):,.1f} ms {'more' if more > 0 else 'less'} {where}"
        for more, where in (
            (after.between_ms - before.between_ms, "between two iterations"),
            (after.longer_ms - before.longer_ms, "in iterations that take longer than the median"),
        )
        if abs(more) >= SMALL * before.mean_ms
    ]
    both = f"{after.mean_ms:,.1f} against {before.mean_ms:,.1f} ms"
    return f"On average B takes {both} from one iteration to the next: {', '.join(parts)}. In the median, {usual}"


def _times(a: IterationTime, b: IterationTime) -> str:
    parts = [f"{one.figure} ms {one.spread.doubt(one.text)}" for one in (b, a)]
    return " against ".join(parts)


def _usual_in_words(before: Usual, after: Usual, logged: tuple[IterationTime, IterationTime] | None) -> str:
    a, b, unit = before.iteration_ms, after.iteration_ms, "per iteration"
    both, apart = f"{b:,.1f} against {a:,.1f} ms", f"{abs(b - a):,.1f}"
    if logged is not None:
        a, b, unit = logged[0].ms, logged[1].ms, logged[0].unit
        both, apart = _times(*logged), logged[0].text(abs(b - a))
    if abs(b - a) < SMALL * a:
        return f"B is as fast as A: {both} {unit}."
    sign, word = (1, "slower") if b > a else (-1, "faster")
    message = f"B is {apart} ms {word} {unit} ({both}, {b / a - 1:+.0%})"
    moved, least = changes(before, after), NAMED * abs(after.iteration_ms - before.iteration_ms)
    work = [one for one in moved if one.kind not in ("idle", "other") and sign * one.more >= least]
    named = work[:MOST_NAMED] or [one for one in moved if sign * one.more >= least][:1]
    how = "more" if sign > 0 else "less"
    parts = [f"{abs(one.more):,.1f} ms {how} in {_where(one)}" for one in named]
    return f"{message}: {', '.join(parts)}." if parts else f"{message}."


def _where(one: Change) -> str:
    what = {"forward": "forward passes", "backward": "backward passes", "idle": "idle time", "other": "other time"}
    kind = what.get(one.kind, one.kind)
    if one.rank is not None:
        if one.others:
            return f"{kind} of rank {one.rank} and {plural(one.others, 'other')} of stage {one.stage}"
        return f"rank {one.rank}'s {kind} (stage {one.stage})"
    return kind if one.stage is None else f"stage {one.stage}'s {kind}"
