"""The page of what was measured of a model: its gradient buckets, and what several streams on a GPU gain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from conf.visible import plural
from fasop.costs.profiles.profile import LayerProfile
from reports.figures.chart import lines
from reports.figures.embed import SERIES, embedded, figure, page_with_figures
from reports.figures.page import copyable, table

MOST_TICKS = 12
"""Under the buckets."""


def render(command: str, profiles: Mapping[str, LayerProfile]) -> str:
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
