"""Why an iteration takes as long as it does: its critical path in words, what changes would bring, idle times."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import pandas as pd

from conf.visible import numbered, plural
from megatron_ext.contract.plan import Plan
from reports.figures.chart import Part, stacked
from reports.figures.embed import BORDER, SERIES, SOFT, embedded
from reports.figures.page import Cell, Row, copy_button, table
from reports.path.change import Cause, Gain
from reports.path.critical import IDLE, Segment
from reports.path.graph import EdgeKind
from reports.path.why import CLEAR, CLOSE, ITERATIONS, Unexplained, Why
from reports.sections.findings_section import launch_with

SMALL = 0.01
"""A smaller part of an iteration is summed up as the rest."""
MOST_RANKS = 64
"""The most rows of the table of ranks, which are those that are idle longest."""
MOST_BARS = 16
"""The most bars of the chart, where a run has one stage."""
PIPELINE = (EdgeKind.COMPUTE, EdgeKind.MESSAGE, EdgeKind.TENSOR)
NAMES = {
    EdgeKind.COMPUTE: "computing",
    EdgeKind.MESSAGE: "messages",
    EdgeKind.TENSOR: "tensor group",
    EdgeKind.GRADIENTS: "the gradients' all-reduce",
    EdgeKind.EMBEDDING: "the embedding's all-reduce",
    EdgeKind.WEIGHTS: "the weights' all-gather",
    EdgeKind.NORM: "the all-reduce of the gradient's norm",
    EdgeKind.OPTIMIZER: "the optimizer",
    EdgeKind.DATA: "loading data",
    EdgeKind.HOST: "between the recorded events",
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


def cause_section(why: Why | Unexplained | None, plan: Plan, overrides: Sequence[str] = ()) -> str:
    """The section of a run's page, as HTML; nothing where there is no steady iteration. `overrides`: the words that the
    run was launched with."""
    if why is None:
        return ""
    if isinstance(why, Unexplained):
        return _section(f'<p class="none">{escape(why.reason)}</p>')
    answer = f'<p class="reason">{escape(cause_in_words(why))}</p><p>{escape(path_in_words(why, plan))}</p>'
    drawn = "" if why.streams else ' <a href="timeline.html#path">The critical path over the timeline →</a>'
    note = f'<p class="note{"" if why.replay_error <= CLOSE else " open"}">{escape(_note(why))}{drawn}</p>'
    return _section(f"{answer}{_changes(why, plan, overrides)}{_chart(why.idle)}{note}{_tables(why, plan)}")


def _section(body: str) -> str:
    return f'<section id="why"><h2>Why an iteration takes this long</h2>{body}</section>'


def path_frame(path: Sequence[Segment], plan: Plan) -> pd.DataFrame:
    """A row for each segment of a critical path: its `kind`, its `stage`, what it is `spent_on`, and `ns`."""
    stages = {place.rank: place.stage for place in plan.ranks}
    rows = [(one.kind, stages[one.rank], place_of(one, stages), one.lasts_ns) for one in path]
    return pd.DataFrame(rows, columns=["kind", "stage", "spent_on", "ns"])


def path_in_words(why: Why, plan: Plan) -> str:
    """What the critical path is made of, the largest part first."""
    path, whole = path_frame(why.path, plan), why.length_ms
    sums = path.groupby(path["kind"].replace(list(PIPELINE), EdgeKind.COMPUTE), sort=False)["ns"].sum() / 1e6
    named = sums[sums >= SMALL * whole].sort_values(ascending=False, kind="stable")
    parts = [
        f"{_ms(ms)} ms {'' if kind == EdgeKind.HOST else 'for '}"
        + (_pipeline(path, plan) if kind == EdgeKind.COMPUTE else _other(EdgeKind(kind), path, plan))
        for kind, ms in named.items()
    ]
    rest = whole - named.sum()
    parts += [f"{_ms(rest)} ms for everything else"] if rest >= 0.05 else []
    return f"One iteration takes {_ms(whole)} ms: {'; '.join(parts)}."


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _pipeline(path: pd.DataFrame, plan: Plan) -> str:
    """The passes and their messages, and what most of that is."""
    if plan.pipeline == 1:
        return "computing"
    places = path[path["kind"].isin(PIPELINE)].groupby("spent_on", sort=False)["ns"].sum() / 1e6
    return f"the pipeline ({_ms(places.max())} of it {places.idxmax()})"


def place_of(segment: Segment, stages: Mapping[int, int]) -> str:
    """What a part of the path is spent with, and where."""
    stage = stages[segment.rank]
    if segment.kind == EdgeKind.MESSAGE and segment.sender >= 0:
        ends = sorted((stages[segment.sender], stage))
        return f"messages between stages {ends[0]} and {ends[1]}"
    if segment.kind == EdgeKind.MESSAGE:
        return f"passing messages on stage {stage}"
    if segment.kind == EdgeKind.TENSOR:
        return f"the tensor group of stage {stage}"
    if segment.kind == EdgeKind.HOST:
        return f"time between the recorded events on stage {stage}"
    return f"{NAMES[segment.kind]} {'on' if segment.kind == EdgeKind.COMPUTE else 'of'} stage {stage}"


def _other(kind: EdgeKind, path: pd.DataFrame, plan: Plan) -> str:
    if kind == EdgeKind.EMBEDDING and plan.pipeline > 2:
        inner = range(1, plan.pipeline - 1)
        joined = "and" if len(inner) == 2 else "to"
        waits = f"stage {inner[0]} waits" if len(inner) == 1 else f"stages {inner[0]} {joined} {inner[-1]} wait"
        return f"{NAMES[kind]}, which {waits} for"
    if kind in (EdgeKind.DATA, EdgeKind.GRADIENTS, EdgeKind.OPTIMIZER):
        found = sorted(path.loc[path["kind"] == kind, "stage"].unique().tolist())
        return f"{NAMES[kind]} on {numbered('stage', found)}"
    return NAMES[kind]


def cause_in_words(why: Why) -> str:
    """What makes times uncertain, then the cause that stands out and what its change gains, or that there is none."""
    best = why.cause
    if best is None:
        message = f"No single cause stands out: {_none_in_words(why)}"
    else:
        mean = "on average " if best.mean else ""
        both = f"{_ms(best.before_ns / 1e6)} → {_ms(best.period_ns / 1e6)} ms"
        message = f"{best.because} Largest gain: {best.change}, {mean}{both} ({best.share:.1%} less{_range(best)})."
        if best.usual_excess > best.share + SMALL:
            message += (
                f" Beyond what the plan would take on healthy, equal hardware: {best.usual_excess:.1%} of an "
                "iteration without waits for CPU cores."
            )
    plan = next((one for one in why.gains if one.cause == Cause.PLAN and one.share >= SMALL), None)
    if plan is not None and (best is None or plan.share > best.share):
        message += (
            f" tdpp search predicts {'a' if best is None else 'a larger'} gain: {_ms(plan.period_ns / 1e6)} ms "
            f"({plan.share:.1%} less)."
        )
    return " ".join([*why.conditions, message])


def _none_in_words(why: Why) -> str:
    """Why none stands out, and what was looked at."""
    looked = f"{plural(why.replayed, 'change')} {'was' if why.replayed == 1 else 'were'} replayed in {_iterations(why)}"
    if why.replay_error > CLOSE:
        error = _replay_error(why)
        return f"{looked}, but replayed without a change the iterations take {error}, so the gains are not reliable."
    if not why.tried:
        plans = ", nor would a plan from tdpp search" if why.searched and why.gains[0].share < SMALL else ""
        return f"{looked}, and none gains {SMALL:.0%} or more{plans}."
    first = why.tried[0]
    other = next((one for one in why.tried if one.cause != first.cause and one.excess), None)
    message = f"{looked}. The largest gain, {first.change}, is {first.share:.1%}{_range(first)}"
    if first.least <= 0:
        return f"{message}: not in every iteration."
    if first.share >= CLEAR and first.usual_excess < CLEAR:
        return f"{message}; the plan itself takes {'all' if first.usual_excess < SMALL else 'most'} of that time."
    if first.least_excess < CLEAR:
        return f"{message}."
    return f"{message}; {other.change}: {other.share:.1%}{_range(other)}." if other is not None else f"{message}."


def _iterations(why: Why) -> str:
    many = plural(len(why.iterations), "iteration")
    return many if len(why.iterations) >= ITERATIONS else f"{many}, all that are complete and alike"


def _range(gain: Gain) -> str:
    """From the least to the largest gain, where iterations differ."""
    least, most = f"{gain.least:.1%}", f"{gain.most:.1%}"
    return "" if least == most else f"; {least} to {most} in {plural(len(gain.shares), 'iteration')}"


def _changes(why: Why, plan: Plan, overrides: Sequence[str]) -> str:
    """The gains; of the plan that a search would choose, how to search it where that was not done."""
    rows: list[Row] = [
        (
            one.change,
            f"{_ms(one.before_ns / 1e6)} → {_ms(one.period_ns / 1e6)} on average"
            if one.mean
            else _ms(one.period_ns / 1e6),
            _less(one.share),
            "predicted" if one.cause == Cause.PLAN else f"{_less(one.least)} to {_less(one.most)}",
            Cell(copy_button(launch_with(overrides, one.keys))) if one.keys and overrides else "",
        )
        for one in why.listed
    ]
    if not why.searched:
        search = shlex.join(["tdpp", "report", plan.run, "--search"])
        rows.append(("the plan that tdpp search would choose", "–", "–", "not searched", Cell(copy_button(search))))
    return table(("change", "iteration ms", "gain", f"range in {_iterations(why)}", "next"), rows, kind="gains")


def _less(share: float) -> str:
    shown = f"{abs(share):.1%}"
    return shown if shown == "0.0%" else f"{'−' if share >= 0 else '+'}{shown}"


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
    return embedded(stacked(names, shown, title), title)


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
    head = ("compute", "optimizer", *IDLE, "communication", "hidden %")
    tables = "".join(
        table((name, *head), [list(_idle_row(str(key), row)) for key, row in frame.iterrows()], kind="numeric")
        for name, frame in frames.items()
    )
    return (
        f"<details><summary>Idle time by cause</summary>{tables}"
        f'<p class="note">{escape(IDLE_MEANING)}</p></details>'
        f"<details><summary>The critical path</summary>{_path_table(why, plan)}</details>"
    )


def _idle_row(key: str, row: pd.Series) -> Iterator[str]:
    yield key
    for column in ("compute", "optimizer", *IDLE, "under_way"):
        yield f"{row[column]:,.1f}"
    yield f"{row['hidden'] / row['under_way']:.1%}" if row["under_way"] > 0 else "–"


def _path_table(why: Why, plan: Plan) -> str:
    sums = path_frame(why.path, plan).groupby("spent_on", sort=False)["ns"].agg(["sum", "count"])
    rows = [
        (str(where), f"{ns / 1e6:,.1f}", f"{ns / 1e6 / why.length_ms:.1%}", f"{count:.0f}")
        for where, ns, count in sums.sort_values("sum", ascending=False, kind="stable").itertuples()
    ]
    return table(("spent on", "ms", "of the iteration", "pieces"), rows, kind="gains")


def _replay_error(why: Why) -> str:
    return f"{why.replay_error:.1%} {'less' if why.ratio < 1 else 'more'} than they took (median)"


def _note(why: Why) -> str:
    back = "which leads back from the end, at each step to what it waited for last"
    message = (
        f"The path and the idle times are those of iteration {why.iteration}, which took about as long as the median "
        f"of the log. The path's parts are those of the critical path, {back}"
        f"{', for as long as an iteration takes' if why.streams else ''}. Changes are replayed in {_iterations(why)}: "
        "compute and messages keep their recorded times except for the change, and waiting follows. A gain is the "
        f"median over these iterations; of {ITERATIONS} its range leaves out the smallest and the largest. A cause is "
        "named by what it takes beyond what the plan would take on healthy, equal hardware: over the whole range at "
        f"least {CLEAR:.0%} of an iteration without waits for CPU cores, and at least what any other cause usually "
        "takes. What the plan itself takes is listed, but is no cause: collectives that take what their bytes cost, "
        f"the optimizer, checkpoints. The median of the steady iterations is {why.recorded_ms:,.1f} ms. "
        f"Replayed without a change, iterations take {_replay_error(why)}"
    )
    message += "." if why.replay_error <= CLOSE else "; gains are uncertain."
    if any(one.mean for one in why.gains):
        message += " On average: the mean over iterations of different length, including the time between them."
    if why.absent:
        many = len(why.absent) > 1
        message += f" {numbered('Rank', why.absent)} ha{'ve' if many else 's'} no events in it."
    return message
