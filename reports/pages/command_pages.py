"""The page of what was measured of a model: its gradient buckets, and what several streams on a GPU gain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from conf.visible import plural
from fasop.costs.profiles.profile import LayerProfile
from reports.figures.chart import lines
from reports.figures.embed import SERIES, SOFT, embedded, figure, page_with_figures
from reports.figures.page import bullets, copyable, table
from reports.figures.page import table as html_table

MOST_TICKS = 12
"""Under the buckets."""


def profile_page(command: str, profiles: Mapping[str, LayerProfile]) -> str:
    """The page, as HTML.

    Args:
        profiles: by their names, of one job.
    """
    body = [
        f'<header><p class="crumbs">tdpp profile</p><h1>{escape(", ".join(profiles))}</h1></header><main>',
        *(part for name, profile in profiles.items() for part in _sections(name, profile)),
        f"<section><h2>Command</h2>{copyable(command)}</section>",
        "</main>",
    ]
    return page_with_figures("Profile – tdpp", "\n".join(body))


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
    drawn = "".join(_drawn(given) for given in figures)
    body = [
        f'<header><p class="crumbs">tdpp data</p><h1>{escape(title)}</h1></header><main>',
        f'<dl class="cards">{cards}</dl>',
        f'<section><h2>Charts</h2><div class="charts">{drawn}</div></section>' if drawn else "",
        "</main>",
    ]
    return page_with_figures(f"{title} – tdpp", "\n".join(body))


def _drawn(given: Mapping[str, Any]) -> str:
    name = given["layout"]["title"]["text"]
    return embedded(figure(title=name, height=320).update_layout(given["layout"]).add_traces(given["data"]), name)


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
    body = [
        f'<header><p class="crumbs">tdpp rehearse learning</p><h1>{escape(title)}</h1></header><main>',
        f'<section class="verdict good">{bullets(notes)}{copyable(command)}</section>',
        f"<section><h2>Plans</h2>{html_table(head, rows)}</section>",
        _curves(f"{metric} against samples", "samples", plans, [plan.samples for plan in plans], goal),
    ]
    if timed:
        seconds = [plan.seconds or () for plan in timed]
        unit, size = ("hours", 3600.0) if max(map(max, seconds)) >= 7200 else ("seconds", 1.0)
        scaled = [[one / size for one in of] for of in seconds]
        body.append(_curves(f"{metric} against predicted time", f"predicted {unit}", timed, scaled, goal))
    return page_with_figures("Learning rehearsal – tdpp", "\n".join([*body, "</main>"]))


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
    for number, (plan, x) in enumerate(zip(plans, places, strict=True)):
        if plan.lows == plan.highs:
            continue
        made.add_scatter(
            x=[*x, *reversed(x)],
            y=[*plan.highs, *reversed(plan.lows)],
            fill="toself",
            fillcolor=SERIES[number % len(SERIES)],
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
    if goal is not None and math.isfinite(goal):
        made.add_hline(y=goal, line={"color": SOFT, "dash": "dash", "width": 1})
    return made
