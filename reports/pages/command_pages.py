"""The pages of single commands: of profiles, of data, of learning rehearsals and of simulated trainings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from conf.visible import plural, span
from fasop.costs.profiles.profile import LayerProfile
from fasop.tables.trainings import DIGITS, HEAD, Results, row, summary
from fasop.trainings.played import Played
from megatron_ext.contract.adaptive.forecast import HOUR
from reports.figures.chart import Axis, Item, dots, lines
from reports.figures.embed import SERIES, SOFT, embedded, figure, framed
from reports.figures.page import Names, bullets, copyable, number, table

MOST_TICKS = 12
"""Under the buckets."""


def profile_page(command: str, profiles: Mapping[str, LayerProfile]) -> str:
    """What was measured of a model: its gradient buckets, and what several streams on a GPU gain; as HTML. `profiles`:
    by their names, of one job."""
    parts = [part for name, profile in profiles.items() for part in _sections(name, profile)]
    parts.append(f"<section><h2>Command</h2>{copyable(command)}</section>")
    return framed("Profile", "tdpp profile", ", ".join(profiles), parts)


def _sections(name: str, profile: LayerProfile) -> Iterator[str]:
    device = profile.device or "device unknown"
    yield f"<section><h2>{escape(name)}: {escape(profile.gpu)} ({escape(device)})</h2>"
    drawn = list(_rates(profile))
    yield "".join(f"<p>{escape(_best(rates))}</p>" for rates in drawn if len(rates) > 1)
    for model, sizes in profile.buckets_mib.items():
        shown = embedded(drawn_buckets(model, sizes), f"Gradient buckets of {model}")
        rows = [(str(number), f"{size:,.4g}") for number, size in enumerate(sizes)]
        every = f"<details><summary>All buckets</summary>{table(('bucket', 'MiB'), rows)}</details>"
        yield shown + every
    if drawn:
        chart = lines(drawn, x_title="streams", title="Samples per second", from_zero=True)
        on_cpu = "" if "cuda" in profile.versions else "<p>On a CPU streams are threads, which share its cores.</p>"
        yield embedded(chart, "Samples per second by streams on a rank") + on_cpu
    if not (drawn or profile.buckets_mib):
        yield "<p>Gradient buckets and streams were not measured; use streams=1,2,4 or micro_batches=32+.</p>"
    yield "</section>"


def drawn_buckets(model: str, sizes: list[float]) -> go.Figure:
    """Their sizes, in the order in which the backward pass completes them."""
    made = figure(title=escape(f"Gradient buckets of {model}"))
    made.add_bar(
        x=list(range(len(sizes))),
        y=sizes,
        marker={"color": SERIES[0]},
        hovertemplate="bucket %{x}: %{y:,.4g} MiB<extra></extra>",
    )
    made.update_xaxes(title_text="bucket, in the order of the backward pass")
    made.update_xaxes(tick0=0, dtick=-(-len(sizes) // MOST_TICKS))
    made.update_yaxes(title_text="MiB", rangemode="tozero")
    return made


def _best(rates: pd.Series) -> str:
    """What several streams gain over the fewest."""
    best, fewest = rates.idxmax(), rates.index.min()
    if best == fewest:
        return f"{rates.name}: more than {plural(int(fewest), 'stream')} would not train more samples per second."
    more = f"{rates[best] / rates[fewest]:.2f} times as many as {plural(int(fewest), 'stream')}"
    return f"{rates.name}: {best} streams train {rates[best]:,.0f} samples per second, {more}."


def _rates(profile: LayerProfile) -> Iterator[pd.Series]:
    """Samples a second over streams, for every micro-batch and host."""
    for steps in profile.steps:
        if steps.precision is None:
            continue
        rates = {
            times.workers: times.workers * steps.micro_batch_size / (times.forward + times.backward) * 1e3
            for times in steps.times
        }
        name = f"{steps.model}, micro-batch {steps.micro_batch_size} in {steps.precision}, {steps.host}"
        yield pd.Series(rates, name=name)


def figures_page(title: str, facts: Mapping[str, str], figures: Sequence[Mapping[str, Any]]) -> str:
    """A whole page; each figure has Plotly's `data` and `layout` in plain values, and a title in its layout."""
    cards = "".join(
        f'<div class="card"><dt>{escape(fact)}</dt><dd>{escape(value)}</dd></div>' for fact, value in facts.items()
    )
    drawn = ""
    for given in figures:
        name = given["layout"]["title"]["text"]
        made = figure(title=name, height=320).update_layout(given["layout"]).add_traces(given["data"])
        drawn += embedded(made, name)
    charts = f'<section><h2>Charts</h2><div class="charts">{drawn}</div></section>' if drawn else ""
    return framed(title, "tdpp data", title, [f'<dl class="cards">{cards}</dl>', charts])


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well a plan learned, evaluation by evaluation: the mean of its seeds, and their lowest and highest."""

    name: str
    samples: Sequence[int]
    seconds: Sequence[float] | None
    """Predicted; None where nobody knows."""
    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


def learning_page(
    command: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    plans: Sequence[Quality],
    metric: str,
    goal: float | None,
) -> str:
    """The page, as HTML. `rows` are those of the plans under `head`, the first one first; of several plans the first of
    the `notes` says which one that is."""
    timed = [plan for plan in plans if plan.seconds is not None]
    title, *notes = notes if len(plans) > 1 else [plans[0].name, *notes]
    parts = [
        f'<section class="verdict good">{bullets(notes)}{copyable(command)}</section>',
        f"<section><h2>Plans</h2>{table(head, rows)}</section>",
        _curves(f"{metric} against samples", "samples", plans, [plan.samples for plan in plans], goal),
    ]
    if timed:
        seconds = [plan.seconds or () for plan in timed]
        unit, size = ("hours", 3600.0) if max(map(max, seconds)) >= 7200 else ("seconds", 1.0)
        scaled = [[one / size for one in of] for of in seconds]
        parts.append(_curves(f"{metric} against predicted time", f"predicted {unit}", timed, scaled, goal))
    return framed("Learning rehearsal", "tdpp rehearse learning", title, parts)


def _curves(
    title: str, x_title: str, plans: Sequence[Quality], places: Sequence[Sequence[float]], goal: float | None
) -> str:
    return f"<section>{embedded(drawn_qualities(title, x_title, plans, places, goal), title)}</section>"


def drawn_qualities(
    title: str, x_title: str, plans: Sequence[Quality], places: Sequence[Sequence[float]], goal: float | None
) -> go.Figure:
    """A line for each plan, in a band from its lowest to its highest seed, and the goal across."""
    series = [pd.Series(plan.means, index=x, name=plan.name) for plan, x in zip(plans, places, strict=True)]
    made = lines(series, x_title=x_title, title=title)
    for index, (plan, x) in enumerate(zip(plans, places, strict=True)):
        if plan.lows == plan.highs:
            continue
        made.add_scatter(
            x=[*x, *reversed(x)],
            y=[*plan.highs, *reversed(plan.lows)],
            fill="toself",
            fillcolor=SERIES[index % len(SERIES)],
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
    if goal is not None and math.isfinite(goal):
        made.add_hline(y=goal, line={"color": SOFT, "dash": "dash", "width": 1})
    return made


MOST_LINES = len(SERIES)
"""Trainings whose batch is drawn: no two of them have the same colour."""


def simulation_page(command: str, results: Results, notes: Sequence[str]) -> str:
    """Time against dollars of all sets of nodes, and the batch over samples; as HTML."""
    title, *more = summary(results)
    drawn = _trainings_drawn(results)
    parts = [
        f'<section class="verdict good">{bullets([*more, *notes])}',
        f"{copyable(command)}</section>",
        f"<section><h2>Time and cost</h2>{_costs(results)}{_batches(drawn)}{_paces(drawn)}</section>",
        _epochs(results),
        _trainings_table(results),
    ]
    return framed("Simulation", "tdpp simulate", title, parts)


def _trainings_drawn(results: Results) -> list[Played]:
    """The quickest, the cheapest, that of the plan and the one that changes nodes; then others of the front."""
    own = [one for one in results.trainings if one.name == results.own]
    wanted = [results.quickest, results.cheapest, results.elastic, *own, *results.front]
    found: dict[str, Played] = {one.name: one for one in wanted if one is not None}
    return list(found.values())[:MOST_LINES]


def _costs(results: Results) -> str:
    """Nothing where no price is known."""
    ordered = [*results.ordered, *([results.elastic] if results.elastic else [])]
    if all(one.dollars is None for one in ordered):
        return ""
    best, ahead = results.quickest, results.front
    items = [
        Item(name=one.name, link="", tone="best" if one is best else "front" if one in ahead else "") for one in ordered
    ]
    dollars = Axis(title="$", values=[math.nan if one.dollars is None else one.dollars for one in ordered])
    time = Axis(title="hours", values=[one.seconds / HOUR for one in ordered])
    return embedded(dots(items, dollars, time), "Hours and US dollars of every set of nodes")


def _batches(drawn: Sequence[Played]) -> str:
    series = []
    for one in drawn:
        steps = one.steps()
        places = [at for step, after in itertools.pairwise(steps) for at in (step[0], after[0])]
        values = [batch for _, batch in steps[:-1] for _ in range(2)]
        series.append(pd.Series(values, index=places, name=one.name))
    apart = _told_apart(series)
    title = "Global batch" if len(apart) == len(series) else "Global batch; equal lines are drawn once"
    return embedded(lines(apart, x_title="samples", title=title, from_zero=True), "Global batch over samples")


def _paces(drawn: Sequence[Played]) -> str:
    """Samples trained over hours."""
    series = []
    for one in drawn:
        samples, seconds = one.trajectory()
        series.append(pd.Series(samples, index=[second / HOUR for second in seconds], name=one.name))
    series = _told_apart(series)
    return embedded(lines(series, x_title="hours", title="Samples trained", from_zero=True), "Samples over hours")


def _told_apart(series: Sequence[pd.Series]) -> list[pd.Series]:
    """Merges equal series into one line with all their names."""
    alike: dict[tuple[tuple[float, ...], ...], list[pd.Series]] = {}
    for one in series:
        alike.setdefault((tuple(one.index), tuple(one)), []).append(one)
    return [some[0].rename(", ".join(str(one.name) for one in some)) for some in alike.values()]


def _epochs(results: Results) -> str:
    """Draws the epochs of the training that changes nodes, or of the quickest."""
    one = results.elastic or results.quickest
    samples, called = results.span
    parts = one.epochs(samples)
    rows = [(str(part.number), part.nodes, number(part.batch, ",.0f"), span(part.seconds, DIGITS)) for part in parts]
    drawn = table(("epoch" if called == "epoch" else "part", "nodes", "mean batch", "time"), rows)
    note = "" if called == "epoch" else f'<p class="note">Each part is {escape(called)}; use epoch=N for epochs.</p>'
    return f"<section><details><summary>{escape(one.name)}, epoch by epoch</summary>{drawn}{note}</details></section>"


def _trainings_table(results: Results) -> str:
    """The sets of nodes that are something among all; behind them the others."""
    every = [*results.ordered, *([results.elastic] if results.elastic else [])]
    marked = [one for one in every if results.marks(one) or one is results.elastic]
    drawn = f"<section><h2>Sets of nodes</h2>{_training_rows(results, marked)}"
    if len(marked) < len(every):
        drawn += f"<details><summary>All {len(every)} sets of nodes</summary>{_training_rows(results, every)}</details>"
    return f"{drawn}</section>"


def _training_rows(results: Results, trainings: Sequence[Played]) -> str:
    rows = [row(results, one) for one in trainings]
    return table(HEAD, [[Names([name]), gpus, Names([batch]), *rest] for name, gpus, batch, *rest in rows])
