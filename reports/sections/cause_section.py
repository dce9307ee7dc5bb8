"""Why an iteration takes as long as it does: its critical path in words, what changes would bring, idle times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import pandas as pd

from conf.run_folder.rank_ranges import rank_ranges
from megatron_ext.contract.plan import Plan
from reports.figures.embed import embedded
from reports.figures.page import table
from reports.figures.stacked import Part, stacked
from reports.figures.template import BORDER, SERIES, SOFT
from reports.path.change import Cause
from reports.path.critical import Segment
from reports.path.graph import Kind
from reports.path.idle import IDLE
from reports.path.why import Unexplained, Why

SMALL = 0.01
"""Of an iteration; what is less is summed up as the rest."""
CLOSE = 0.02
"""How far the replay of the iteration as it was may be from the recorded median."""
MOST_RANKS = 64
"""Of more, the table of ranks has those that are idle longest."""
MOST_BARS = 16
"""Of the chart, where a run has one stage."""
PIPELINE = (Kind.COMPUTE, Kind.MESSAGE, Kind.TENSOR)
NAMES = {
    Kind.COMPUTE: "computing",
    Kind.MESSAGE: "messages",
    Kind.TENSOR: "tensor group",
    Kind.GRADIENTS: "the gradients' all-reduce",
    Kind.EMBEDDING: "the embedding's all-reduce",
    Kind.WEIGHTS: "the weights' all-gather",
    Kind.NORM: "the all-reduce of the gradient's norm",
    Kind.OPTIMIZER: "the optimizer",
    Kind.DATA: "loading data",
    Kind.HOST: "between the recorded events",
}
COLOURS = dict(zip(IDLE, (BORDER, SERIES[1], SERIES[2], "#a5549b", "#b3a000", SOFT), strict=True))
WAITING = ("pipeline order", "slow neighbour")
IDLE_MEANING = (
    "Milliseconds per iteration; means over several ranks. Idle time is everything except compute and the optimizer. "
    "The iteration is replayed without and then with each cause, one after another; the difference is the cause's "
    "idle time. Pipeline order: the cost of the schedule with equal stages. Slow neighbour: waiting for a slower "
    "rank. Message: messages between stages, and waiting for ranks that wait for one. Collective: all-reduces and "
    "other collectives. Data: loading data. Host: time between the recorded events. The chart hatches waiting. "
    "Communication: time during which messages and collectives were under way. Hidden: the part of it during which "
    "the rank kept computing."
)


def cause_section(why: Why | Unexplained | None, plan: Plan) -> str:
    """The section of a run's page, as HTML; nothing where there is no steady iteration."""
    if why is None:
        return ""
    if isinstance(why, Unexplained):
        return _section(f'<p class="none">{escape(why.reason)}</p>')
    answer = f'<p class="reason">{escape(cause_in_words(why))}</p><p>{escape(path_in_words(why, plan))}</p>'
    drawn = "" if why.streams else ' <a href="timeline.html#path">The critical path over the timeline →</a>'
    note = f'<p class="note{"" if _agrees(why) else " open"}">{escape(_note(why))}{drawn}</p>'
    return _section(f"{answer}{_changes(why)}{_chart(why.idle)}{note}{_tables(why, plan)}")


def _section(body: str) -> str:
    return f'<section id="why"><h2>Why an iteration takes this long</h2>{body}</section>'


def path_in_words(why: Why, plan: Plan) -> str:
    """What the critical path is made of, the largest part first."""
    whole = why.length_ms
    stages = {place.rank: place.stage for place in plan.ranks}
    sums: dict[Kind, float] = {}
    for segment in why.path:
        kind = Kind.COMPUTE if segment.kind in PIPELINE else segment.kind
        sums[kind] = sums.get(kind, 0.0) + segment.lasts_ns / 1e6
    named = {kind: ms for kind, ms in sums.items() if ms >= SMALL * whole}
    parts = [
        _ms(ms) + " ms " + (_pipeline(why.path, stages, plan) if kind == Kind.COMPUTE else _other(kind, plan, why))
        for kind, ms in sorted(named.items(), key=lambda item: -item[1])
    ]
    rest = whole - sum(named.values())
    parts += [f"{_ms(rest)} ms everything else"] if rest >= 0.05 else []
    return f"One iteration takes {_ms(whole)} ms: {'; '.join(parts)}."


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _pipeline(path: Sequence[Segment], stages: Mapping[int, int], plan: Plan) -> str:
    """The passes and their messages, and what most of that is."""
    if plan.pipeline == 1:
        return "computing"
    places: dict[str, float] = {}
    for segment in path:
        if segment.kind in PIPELINE:
            where = place_of(segment, stages)
            places[where] = places.get(where, 0.0) + segment.lasts_ns / 1e6
    most = max(places, key=lambda where: places[where])
    return f"the pipeline ({_ms(places[most])} of it {most})"


def place_of(segment: Segment, stages: Mapping[int, int]) -> str:
    """What a part of the path is spent with, and where."""
    stage = stages[segment.rank]
    if segment.kind == Kind.MESSAGE and segment.sender >= 0:
        ends = sorted((stages[segment.sender], stage))
        return f"messages between stages {ends[0]} and {ends[1]}"
    if segment.kind == Kind.MESSAGE:
        return f"passing messages on stage {stage}"
    if segment.kind == Kind.TENSOR:
        return f"the tensor group of stage {stage}"
    if segment.kind == Kind.HOST:
        return f"time between the recorded events on stage {stage}"
    return f"{NAMES[segment.kind]} {'on' if segment.kind == Kind.COMPUTE else 'of'} stage {stage}"


def _other(kind: Kind, plan: Plan, why: Why) -> str:
    if kind == Kind.EMBEDDING and plan.pipeline > 2:
        inner = range(1, plan.pipeline - 1)
        joined = "and" if len(inner) == 2 else "to"
        waits = f"stage {inner[0]} waits" if len(inner) == 1 else f"stages {inner[0]} {joined} {inner[-1]} wait"
        return f"{NAMES[kind]}, which {waits} for"
    if kind in (Kind.DATA, Kind.GRADIENTS, Kind.OPTIMIZER):
        stages = {place.rank: place.stage for place in plan.ranks}
        found = sorted({stages[segment.rank] for segment in why.path if segment.kind == kind})
        return f"{NAMES[kind]} on stage{'s' if len(found) > 1 else ''} {rank_ranges(found)}"
    return NAMES[kind]


def cause_in_words(why: Why) -> str:
    """What gains most, and how much."""
    if not why.gains:
        plans = ", nor would a plan from tdpp search" if why.searched else ""
        return f"No single change in the replay gains 1% or more{plans}."
    of_run = [one for one in why.gains if one.cause != Cause.PLAN]
    best = (of_run or why.gains)[0]
    mean = "on average " if best.mean else ""
    both = f"{_ms(best.before_ns / 1e6)} → {_ms(best.period_ns / 1e6)} ms"
    said = f"{best.because} Largest gain: {best.change}, {mean}{both} ({best.share:.1%} less)."
    plan = why.gains[0]
    if plan is not best:
        said += f" tdpp search predicts a larger gain: {_ms(plan.period_ns / 1e6)} ms ({plan.share:.1%} less)."
    return said


def _changes(why: Why) -> str:
    if not why.gains:
        return ""
    rows = [
        (
            one.change,
            f"{_ms(one.before_ns / 1e6)} → {_ms(one.period_ns / 1e6)} on average"
            if one.mean
            else _ms(one.period_ns / 1e6),
            f"−{one.share:.1%}",
        )
        for one in why.gains
    ]
    return table(("change", "iteration ms", "gain"), rows, kind="gains")


def _chart(idle: pd.DataFrame) -> str:
    """An iteration of each stage, the mean over its ranks; where there is one stage, of each node or else rank."""
    by = "stage"
    if idle["stage"].nunique() == 1 and 1 < idle["node"].nunique() <= MOST_BARS:
        by = "node"
    elif idle["stage"].nunique() == 1 and len(idle) <= MOST_BARS:
        by = "rank"
    rows = idle.rename_axis("rank").reset_index().groupby(by, sort=by != "node")
    stages = rows[["compute", "optimizer", *IDLE]].mean()
    parts = [
        Part(name="compute", values=stages["compute"].tolist(), colour=SERIES[0]),
        Part(name="optimizer", values=stages["optimizer"].tolist(), colour=SERIES[3]),
        *(
            Part(name=cause, values=stages[cause].tolist(), colour=COLOURS[cause], hatched=cause in WAITING)
            for cause in IDLE
        ),
    ]
    shown = [part for part in parts if sum(part.values) > 0]
    title = f"An iteration of each {by}"
    names = [str(one) if by == "node" else f"{by} {one}" for one in stages.index]
    return embedded(stacked(names, shown, title=title, unit="ms"), title)


def _tables(why: Why, plan: Plan) -> str:
    """What is behind the words and the chart."""
    idle = why.idle
    longest = idle.assign(idle=idle[list(IDLE)].sum(axis=1)).sort_values("idle", ascending=False, kind="stable")
    ranks = idle.loc[sorted(longest.index[:MOST_RANKS])]
    frames = {"stage": idle.drop(columns="node").groupby("stage").mean()}
    if idle["node"].nunique() > 1:
        frames["node"] = idle.drop(columns="stage").groupby("node", sort=False).mean()
    if len(idle) > len(frames["stage"]):
        frames["rank"] = ranks.drop(columns=["stage", "node"])
    tables = "".join(_idle_table(name, frame) for name, frame in frames.items())
    return (
        f"<details><summary>Idle time by cause</summary>{tables}"
        f'<p class="note">{escape(IDLE_MEANING)}</p></details>'
        f"<details><summary>The critical path</summary>{_path_table(why, plan)}</details>"
    )


def _idle_table(name: str, frame: pd.DataFrame) -> str:
    head = (name, "compute", "optimizer", *IDLE, "communication", "hidden %")
    return table(head, [list(_idle_row(str(key), row)) for key, row in frame.iterrows()], kind="numeric")


def _idle_row(key: str, row: pd.Series) -> Iterator[str]:
    yield key
    for column in ("compute", "optimizer", *IDLE, "under_way"):
        yield f"{row[column]:,.1f}"
    yield f"{row['hidden'] / row['under_way']:.1%}" if row["under_way"] > 0 else "–"


def _path_table(why: Why, plan: Plan) -> str:
    stages = {place.rank: place.stage for place in plan.ranks}
    sums: dict[str, list[float]] = {}
    for segment in why.path:
        found = sums.setdefault(place_of(segment, stages), [0.0, 0.0])
        found[0] += segment.lasts_ns / 1e6
        found[1] += 1
    rows = [
        (where, f"{ms:,.1f}", f"{ms / why.length_ms:.1%}", f"{count:.0f}")
        for where, (ms, count) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]
    return table(("spent with", "ms", "of the iteration", "pieces"), rows, kind="gains")


def _agrees(why: Why) -> bool:
    return abs(why.replayed_ms / why.recorded_ms - 1) <= CLOSE


def _note(why: Why) -> str:
    back = "which leads back from the end, at each step to what it waited for last"
    said = (
        f"For iteration {why.iteration}, which took about as long as the median of the log. Its parts are those of the "
        f"critical path, {back}"
        f"{', for as long as an iteration takes' if why.streams else ''}. Changes are replayed: compute and messages "
        "keep their recorded times except for the change, and waiting follows. Replayed without a change, it takes "
        f"{why.replayed_ms:,.1f} ms; the median of the steady iterations is {why.recorded_ms:,.1f} ms"
    )
    said += "." if _agrees(why) else f", {abs(why.replayed_ms / why.recorded_ms - 1):.1%} off; gains are uncertain."
    if any(one.mean for one in why.gains):
        said += " On average: the mean over iterations of different length, including the time between them."
    if why.absent:
        many = len(why.absent) > 1
        said += f" Rank{'s' if many else ''} {rank_ranges(why.absent)} ha{'ve' if many else 's'} no events in it."
    return said
