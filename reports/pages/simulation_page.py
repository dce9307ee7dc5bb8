"""The page of simulated trainings: time against dollars of all sets of nodes, and the batch over samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

import pandas as pd

from conf.visible import span
from fasop.tables.trainings import DIGITS, HEAD, Results, row, summary
from fasop.trainings.played import HOUR, Played
from reports.figures.chart import Axis, Item, dots, lines
from reports.figures.embed import SERIES, embedded, page_with_figures
from reports.figures.page import Names, bullets, copyable, number, table

MOST_LINES = len(SERIES)
"""Trainings whose batch is drawn: no two of them have the same colour."""


def render(command: str, results: Results, notes: Sequence[str]) -> str:
    """The page, as HTML."""
    title, *more = summary(results)
    drawn = _drawn(results)
    body = [
        f'<header><p class="crumbs">tdpp simulate</p><h1>{escape(title)}</h1></header><main>',
        f'<section class="verdict good">{bullets([*more, *notes])}',
        f"{copyable(command)}</section>",
        f"<section><h2>Time and cost</h2>{_costs(results)}{_batches(drawn)}{_paces(drawn)}</section>",
        _epochs(results),
        _table(results),
        "</main>",
    ]
    return page_with_figures("Simulation – tdpp", "\n".join(body))


def _drawn(results: Results) -> list[Played]:
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


def _table(results: Results) -> str:
    """The sets of nodes that are something among all; behind them the others."""
    every = [*results.ordered, *([results.elastic] if results.elastic else [])]
    marked = [one for one in every if results.marks(one) or one is results.elastic]
    drawn = f"<section><h2>Sets of nodes</h2>{_rows(results, marked)}"
    if len(marked) < len(every):
        drawn += f"<details><summary>All {len(every)} sets of nodes</summary>{_rows(results, every)}</details>"
    return f"{drawn}</section>"


def _rows(results: Results, trainings: Sequence[Played]) -> str:
    rows = [row(results, one) for one in trainings]
    return table(HEAD, [[Names([name]), gpus, Names([batch]), *rest] for name, gpus, batch, *rest in rows])
