"""The page of several runs: the best first, if one is better beyond the noise, then all of them in a table and in
charts, repeats of one configuration together, and those that failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from conf.visible import plural
from reports.facts.side_by_side import Compared, differing
from reports.figures.chart import Axis, Item, dots, parallel
from reports.figures.embed import TIMELINE, embedded, framed
from reports.figures.page import Cell, Row, table
from reports.pages.comparison import (
    SPEEDS,
    Front,
    Outcome,
    Pool,
    Ranking,
    front,
    ranking,
    repeats,
    speed,
    speed_field,
    swept,
)
from reports.pages.sweep_answer import AGAINST, DOUBT, MOST_KEYS, QUANTITIES, Quantity, answer, link
from reports.sections.comparison_sections import (
    curves_section,
    depth_section,
    published_section,
    quality_section,
    stages_section,
    throughput_section,
    traffic_section,
)
from reports.sections.difference_section import Timed, difference_section

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
FIRST = ("parallel", "train", "model", "cluster.name")
"""Keys that begin so are shown first."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs that have a result, and what is said of them."""

    sound: Sequence[Pool]
    """Repeats together; the fastest first."""
    keys: Sequence[str]
    """Keys of the configuration that differ, at most MOST_KEYS."""
    others: Sequence[str]
    """More of them."""
    shown: Sequence[Quantity]
    """Those that any run has."""
    ranked: Ranking | None
    pareto: Front | None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Comparison:
        field, keys = speed_field(outcomes), swept(outcomes)
        sound = sorted(repeats(outcomes), key=lambda pool: -speed(pool, field).median)
        ranks = {key: next((at for at, name in enumerate(FIRST) if key.startswith(name)), len(FIRST)) for key in keys}
        ordered = sorted(keys, key=lambda key: ranks[key]) if len(keys) > MOST_KEYS else keys
        known = [quantity for quantity in QUANTITIES if not all(math.isnan(quantity.of(one)) for one in sound)]
        # Tokens follow from samples; where all have both, one of them is enough.
        doubled = field == SPEEDS[0]
        return cls(
            sound=sound,
            keys=ordered[:MOST_KEYS],
            others=ordered[MOST_KEYS:],
            shown=[quantity for quantity in known if not (doubled and quantity.field == SPEEDS[1])],
            ranked=ranking(outcomes),
            pareto=front(outcomes),
        )

    def tone(self, pool: Pool) -> str:
        best = self.ranked.best if self.ranked else None
        if best is not None and pool.links <= best.links:
            return "best"
        return "front" if self.pareto and pool.links & self.pareto.runs else ""


MOST_AXES, MOST_UPRIGHT = 8, 5
"""Beside each other in a chart, and on upright paper, where their labels do not lie over each other."""
MOST_COLUMNS = 5
"""The most runs in a table of their keys."""
SCRIPTS = (*TIMELINE, "iteration.js", "difference.js")
"""Scripts of the section on what differs."""


def render(outcomes: Sequence[Outcome], timed: Sequence[Timed] = ()) -> str:
    """The page, as HTML. `timed`: the runs in the order in which they were given; of two it is shown what differs."""
    compared = Comparison.of(outcomes)
    runs = [Compared(one.name, link(one), one.facts) for one in outcomes]
    failed = [one for one in outcomes if one.failed]
    differs = difference_section(timed)
    others, settings = compared.others, [(one.name, one.settings) for one in outcomes]
    compares = plural(len(outcomes), "run")
    parts = [
        answer(compared.ranked, compared.pareto, outcomes),
        differs,
        *([_table(compared), _charts(compared)] if compared.sound else []),
        *(section(runs) for section in SECTIONS),
        _failed(failed, compared.keys),
        _of_all("Configuration", f"{plural(len(others), 'other key')} that differ", others, settings),
        _machines(outcomes),
    ]
    return framed(compares, "tdpp runs", f"{compares} compared", parts, SCRIPTS if differs else ())


def _table(compared: Comparison) -> str:
    marks = {"best": "★ best", "front": "◆ front", "": ""}
    head = ("run", "state", *map(_short_key, compared.keys), *(quantity.title for quantity in compared.shown))
    rows: list[Row] = [
        (
            Cell(f'{"<br>".join(map(link, pool.runs))} <span class="tag">{marks[compared.tone(pool)]}</span>'),
            " · ".join(
                [
                    *dict.fromkeys(run.verdict.state for run in pool.runs if run.verdict),
                    *(["emulated"] if pool.emulated else []),
                ]
            ),
            *(pool.setting(key) for key in compared.keys),
            *(_bar(pool, quantity, compared.sound) for quantity in compared.shown),
        )
        for pool in compared.sound
    ]
    tones = [f' class="{compared.tone(pool)}"' for pool in compared.sound]
    note = f"★ highest throughput, beyond the noise. {DOUBT} Memory: the peak over all ranks."
    if any(len(pool.runs) > 1 for pool in compared.sound):
        note += " Runs in one row are repeats: their log lines are pooled, while memory and loss count one value a run."
    if compared.pareto:
        note = f"◆ no other run has clearly more throughput and no more {AGAINST[compared.pareto.against]} · {note}"
    drawn = table(head, rows, kind="runs", row_attributes=tones)
    return f'<section><h2>Runs</h2>{drawn}<p class="note">{escape(note)}</p></section>'


def _short_key(key: str) -> str:
    return key.removeprefix("parallel.").removeprefix("train.")


def _bar(pool: Pool, quantity: Quantity, sound: Sequence[Pool]) -> Cell:
    spread = pool.spread(quantity.field)
    if spread is None or not quantity.bar:
        return Cell("–" if spread is None else quantity.cell(spread), ' class="number"')
    most = max(value for one in sound if not math.isnan(value := quantity.of(one)))
    share = quantity.of(pool) / most * 100 if most else 0
    return Cell(quantity.cell(spread), f' class="number bar" style="--share: {share:.1f}%"')


def _charts(compared: Comparison) -> str:
    keys, shown, sound = compared.keys, compared.shown, compared.sound
    items = [Item(name=one.runs[0].name, link=one.runs[0].link, tone=compared.tone(one)) for one in sound]

    def axis(quantity: Quantity) -> Axis:
        halves = [spread.half * quantity.scale if (spread := one.spread(quantity.field)) else math.nan for one in sound]
        return Axis(title=quantity.title, values=[quantity.of(one) for one in sound], halves=halves, from_zero=True)

    parts = []
    by_field = {quantity.field: quantity for quantity in shown}
    weighed = [axis(by_field[field]) for field in ("dollars", "memory_gib") if field in by_field]
    fastest = next(name for name in (*SPEEDS, "iteration_ms", "sample_ms") if name in by_field)
    scatter = [
        embedded(dots(items, one, axis(by_field[fastest])), f"{by_field[fastest].title} and {one.title} of every run")
        for one in weighed
    ]
    parts.append(f'<div class="charts">{"".join(scatter)}</div>')
    settings = [Axis(title=_short_key(key), values=[one.setting(key) for one in sound]) for key in keys]
    results = [axis(quantity) for quantity in shown if quantity.field != "loss"]
    crossed = {"Varied keys and results": [*settings, *results]}
    if len(settings) + len(results) > MOST_AXES:
        crossed = {"Varied keys": [*settings, axis(by_field[fastest])], "Results": results}
    note = '<p class="note">Axes of figures begin at 0. Bars at a point: ±. Click a point to open its run.</p>'
    for title, axes in crossed.items():
        label = f"A line for each run across {title[0].lower()}{title[1:]}"
        parts.append(f'<h3>{title}</h3><div class="scroll">{embedded(parallel(items, axes), label)}</div>')
    wide = ' class="wide"' if any(len(axes) > MOST_UPRIGHT for axes in crossed.values()) else ""
    return f"<section{wide}><h2>Charts</h2>{''.join(parts)}{note}</section>"


def _machines(outcomes: Sequence[Outcome]) -> str:
    """In what the runs' nodes and packages differ."""
    keys = differing([one.machines for one in outcomes])
    what = f"{plural(len(keys), 'fact')} of their machines and packages in which the runs differ"
    return _of_all("Machines and packages", what, keys, [(one.name, one.machines) for one in outcomes])


def _of_all(title: str, summary: str, keys: Sequence[str], runs: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """A row for each key; of many runs, tables of as many as fit on paper."""
    if not keys:
        return ""
    drawn = ""
    for first in range(0, len(runs), MOST_COLUMNS):
        some = runs[first : first + MOST_COLUMNS]
        rows: list[Row] = [(key, *(values.get(key, "–") for _, values in some)) for key in keys]
        drawn += table(("key", *(name for name, _ in some)), rows)
    return f"<section><h2>{title}</h2><details><summary>{summary}</summary>{drawn}</details></section>"


def _failed(failed: Sequence[Outcome], keys: Sequence[str]) -> str:
    if not failed:
        return ""
    rows: list[Row] = [
        (
            Cell(link(one)),
            one.verdict.state if one.verdict else "no result",
            one.verdict.reason if one.verdict else "no iteration logged",
            *(one.settings.get(key, "–") for key in keys),
        )
        for one in failed
    ]
    drawn = table(("run", "state", "reason", *map(_short_key, keys)), rows)
    return f"<section><h2>Without a result</h2>{drawn}</section>"
