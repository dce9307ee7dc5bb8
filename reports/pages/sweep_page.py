"""The page of several runs: the best first, then all of them in a table and in charts, and those that failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from conf.visible import plural
from reports.facts.side_by_side import Compared
from reports.figures.chart import Axis, Item, dots, parallel
from reports.figures.embed import TIMELINE, embedded, page_with_figures
from reports.figures.page import Cell, Row, number, table
from reports.pages.comparison import Front, Outcome, best, front, rivals, speeds, swept
from reports.sections.comparison.curves import curves_section
from reports.sections.comparison.depth import depth_section
from reports.sections.comparison.difference import Timed, difference_section
from reports.sections.comparison.published import published_section
from reports.sections.comparison.quality import quality_section
from reports.sections.comparison.stages import stages_section
from reports.sections.comparison.throughput import throughput_section
from reports.sections.comparison.traffic import traffic_section


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A figure of an Outcome."""

    field: str
    title: str
    form: str
    scale: float = 1.0
    bar: bool = True
    """Whether the table shows it as a bar as well."""

    def of(self, one: Outcome) -> float:
        return float(getattr(one, self.field))


QUANTITIES = (
    Quantity(field="iteration_ms", title="iteration ms", form=",.1f"),
    Quantity(field="tokens_per_s", title="tokens/s", form=",.0f"),
    Quantity(field="utilisation", title="utilisation %", form=".1f", scale=100),
    Quantity(field="dollars", title="$ per million tokens", form=",.3f"),
    Quantity(field="memory_gib", title="memory GiB", form=",.2f"),
    Quantity(field="loss", title="last loss", form=".4f", bar=False),
)
SECTIONS = (
    quality_section,
    curves_section,
    throughput_section,
    traffic_section,
    stages_section,
    depth_section,
    published_section,
)
"""Below the table and the charts of all runs: empty where no run has what they show."""
AGAINST = {"dollars": "cost", "memory_gib": "memory"}
MOST_KEYS = 6
"""Of more keys that differ, so many are shown beside the runs; the others are in a table of their own."""
FIRST = ("parallel", "train", "model", "cluster.name")
"""Keys that begin so are shown first."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs that have a result, and what is said of them."""

    sound: Sequence[Outcome]
    """The fastest first."""
    keys: Sequence[str]
    """Of the configuration, which differ; at most MOST_KEYS."""
    others: Sequence[str]
    """More of them."""
    shown: Sequence[Quantity]
    """Those that any run has."""
    first: Outcome | None
    pareto: Front | None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Comparison:
        speed, keys = speeds(outcomes), swept(outcomes)
        sound = sorted((one for one in outcomes if not one.failed), key=lambda one: -speed[one.link])
        ranks = {key: next((at for at, name in enumerate(FIRST) if key.startswith(name)), len(FIRST)) for key in keys}
        ordered = sorted(keys, key=lambda key: ranks[key]) if len(keys) > MOST_KEYS else keys
        return cls(
            sound=sound,
            keys=ordered[:MOST_KEYS],
            others=ordered[MOST_KEYS:],
            shown=[quantity for quantity in QUANTITIES if not all(math.isnan(quantity.of(one)) for one in sound)],
            first=best(outcomes),
            pareto=front(outcomes),
        )

    def tone(self, one: Outcome) -> str:
        if one is self.first:
            return "best"
        return "front" if self.pareto and one.link in self.pareto.runs else ""


SCRIPTS = (*TIMELINE, "iteration.js", "difference.js")
"""Of the section on what differs."""


def render(outcomes: Sequence[Outcome], timed: Sequence[Timed] = ()) -> str:
    """The page, as HTML.

    Args:
        timed: the runs in the order in which they were given; of two it is shown what differs.
    """
    compared = Comparison.of(outcomes)
    runs = [Compared(one.name, _link(one), one.facts) for one in outcomes]
    failed = [one for one in outcomes if one.failed]
    differs = difference_section(timed)
    body = [
        f'<header><p class="crumbs">tdpp runs</p><h1>{plural(len(outcomes), "run")} compared</h1></header><main>',
        _answer(compared, len(failed)),
        differs,
        *([_table(compared), _charts(compared)] if compared.sound else []),
        *(section(runs) for section in SECTIONS),
        _failed(failed, compared.keys),
        _others(outcomes, compared.others),
        "</main>",
    ]
    return page_with_figures(f"{plural(len(outcomes), 'run')} – tdpp", "\n".join(body), SCRIPTS if differs else ())


def _answer(compared: Comparison, failures: int) -> str:
    first, sound, pareto = compared.first, compared.sound, compared.pareto
    counted = f"{plural(len(sound), 'run')} to compare{f', {failures} without a result' if failures else ''}."
    if emulated := sum(one.emulated for one in sound):
        counted += f" {emulated} of them rehearsed, with emulated times"
        counted += "; the best is one of the others." if emulated < len(sound) else "."
    if first is None:
        return f'<section class="verdict bad"><h2>No result</h2><p class="reason">{escape(counted)}</p></section>'
    settings = ", ".join(f"{key}={first.settings.get(key, '?')}" for key in compared.keys) or "no key differs"
    weighed = f" {len(pareto.runs)} on the Pareto front of throughput and {AGAINST[pareto.against]}." if pareto else ""
    gain = ""
    if len(others := rivals(sound)) > 1:
        speed = speeds(sound)
        gain = f", {speed[first.link] / speed[others[-1].link]:.2f} times as fast as the slowest"
    tokens = "" if math.isnan(first.tokens_per_s) else f"{first.tokens_per_s:,.0f} tokens/s, "
    return (
        f'<section class="verdict good"><h2>Best: {escape(settings)}</h2>'
        f'<p class="reason">{_link(first)}: {tokens}'
        f"{first.iteration_ms:,.1f} ms per iteration{gain}.</p>"
        f'<p class="note">{escape(counted + weighed)}</p></section>'
    )


def _table(compared: Comparison) -> str:
    marks = {"best": "★ best", "front": "◆ front", "": ""}
    head = ("run", "state", *map(_short_key, compared.keys), *(quantity.title for quantity in compared.shown))
    rows: list[Row] = [
        (
            Cell(f'{_link(one)} <span class="tag">{marks[compared.tone(one)]}</span>'),
            " · ".join([*([one.verdict.state] if one.verdict else []), *(["emulated"] if one.emulated else [])]),
            *(one.settings.get(key, "–") for key in compared.keys),
            *(_bar(quantity.of(one), quantity, compared.sound) for quantity in compared.shown),
        )
        for one in compared.sound
    ]
    tones = [f' class="{compared.tone(one)}"' for one in compared.sound]
    note = "★ highest throughput. Memory: the peak over all ranks."
    if compared.pareto:
        note = f"◆ no run has both more throughput and less {AGAINST[compared.pareto.against]} · {note}"
    drawn = table(head, rows, kind="runs", row_attributes=tones)
    return f'<section><h2>Runs</h2>{drawn}<p class="note">{escape(note)}</p></section>'


def _link(one: Outcome) -> str:
    return f'<a href="{escape(one.link)}">{escape(one.name)}</a>'


def _short_key(key: str) -> str:
    return key.removeprefix("parallel.").removeprefix("train.")


def _bar(value: float, quantity: Quantity, sound: Sequence[Outcome]) -> Cell:
    if math.isnan(value) or not quantity.bar:
        return Cell(number(value * quantity.scale, quantity.form), ' class="number"')
    most = max(quantity.of(one) for one in sound if not math.isnan(quantity.of(one)))
    share = value / most * 100 if most else 0
    return Cell(f"{value * quantity.scale:{quantity.form}}", f' class="number bar" style="--share: {share:.1f}%"')


def _charts(compared: Comparison) -> str:
    keys, shown, sound = compared.keys, compared.shown, compared.sound
    items = [Item(name=one.name, link=one.link, tone=compared.tone(one)) for one in sound]

    def axis(quantity: Quantity) -> Axis:
        return Axis(title=quantity.title, values=[quantity.of(one) * quantity.scale for one in sound])

    parts = []
    by_field = {quantity.field: quantity for quantity in shown}
    weighed = [axis(by_field[field]) for field in ("dollars", "memory_gib") if field in by_field]
    speed = axis(by_field.get("tokens_per_s", by_field["iteration_ms"]))
    scatter = [embedded(dots(items, one, speed), f"{speed.title} and {one.title} of every run") for one in weighed]
    parts.append(f'<div class="charts">{"".join(scatter)}</div>')
    settings = [Axis(title=_short_key(key), values=[one.settings.get(key, "–") for one in sound]) for key in keys]
    axes = [*settings, *(axis(quantity) for quantity in shown if quantity.field != "loss")]
    label = "A line for each run across varied keys and results"
    parts.append(f'<h3>Varied keys and results</h3><div class="scroll">{embedded(parallel(items, axes), label)}</div>')
    return f'<section><h2>Charts</h2>{"".join(parts)}<p class="note">Click a point to open its run.</p></section>'


def _others(outcomes: Sequence[Outcome], keys: Sequence[str]) -> str:
    """The keys that no other table has room for, a row for each."""
    if not keys:
        return ""
    rows: list[Row] = [(key, *(one.settings.get(key, "–") for one in outcomes)) for key in keys]
    drawn = table(("key", *(one.name for one in outcomes)), rows)
    counted = plural(len(keys), "other key")
    return (
        f"<section><h2>Configuration</h2><details><summary>{counted} that differ</summary>{drawn}</details></section>"
    )


def _failed(failed: Sequence[Outcome], keys: Sequence[str]) -> str:
    if not failed:
        return ""
    rows: list[Row] = [
        (
            Cell(_link(one)),
            one.verdict.state if one.verdict else "no result",
            one.verdict.reason if one.verdict else "no iteration logged",
            *(one.settings.get(key, "–") for key in keys),
        )
        for one in failed
    ]
    drawn = table(("run", "state", "reason", *map(_short_key, keys)), rows)
    return f"<section><h2>Without a result</h2>{drawn}</section>"
