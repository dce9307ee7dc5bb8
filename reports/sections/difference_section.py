"""What takes longer in the second of two runs, and a typical iteration of each on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd

from conf.run_folder.iteration_time import IterationTime
from conf.visible import plural
from megatron_ext.contract.plan import Plan
from reports.facts.difference import SMALL, Change, Usual, changes, in_words, usual
from reports.facts.representatives import slowest_first
from reports.facts.statistics import Statistics
from reports.figures.embed import looks
from reports.figures.pack import pack
from reports.figures.page import Cell, Row, data, table
from reports.readers.events import Timeline, legend_order

MOST_ROWS = 12
"""The most rows of the table; a pipeline of many stages has as many changes of a kind, and others are folded."""
_NOTE = (
    "Medians by events, over steady iterations and the ranks of a stage. The rows of a stage add up to the iteration: "
    "extra time on one stage is idle time on the others. A rank has its own row if most of its stage do not change "
    "like it. Idle: waiting for another rank. Other: time without events. "
    f"Changes below {SMALL:.1%} of an iteration are left out."
)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A run with the times of its events."""

    name: str
    link: str
    """To its page."""
    plan: Plan
    micro_batches: int
    time: IterationTime | None
    timeline: Timeline
    figures: Statistics


def difference_section(runs: Sequence[Timed]) -> str:
    """Returns HTML with the data of `static/difference.js`; empty unless it is given two runs that both have a
    steady iteration."""
    if len(runs) != 2:
        return ""
    known = [usual(run.timeline, run.figures, run.plan) for run in runs]
    if known[0] is None or known[1] is None:
        return ""
    before, after = known[0], known[1]
    named = " · ".join(
        f'{letter}: <a href="{escape(run.link)}">{escape(run.name)}</a>' for letter, run in zip("AB", runs, strict=True)
    )
    timelines = "".join(
        f'<h3>{letter}, iteration {_shown(run)}</h3><div class="iteration" id="iteration-{letter}"></div>'
        for letter, run in zip("AB", runs, strict=True)
    )
    names = legend_order({name for run in runs for name in run.timeline.names})
    columns = [_columns(run, names) for run in runs]
    together = {key: np.concatenate([one[key].to_numpy(np.int64) for one in columns]) for key in columns[0]}
    packed = pack(together)
    facts = {
        "names": names,
        "layout": packed.layout,
        "runs": [_facts(run, len(frame)) for run, frame in zip(runs, columns, strict=True)],
    }
    message = escape(in_words(before, after, _logged(runs)))
    return (
        f'<section id="difference"><h2>What differs</h2><p class="reason">{message}</p>'
        f"<p>{named}</p>{_table(before, after)}"
        f'<p class="note">{escape(_NOTE)}</p></section><section><h2>A typical iteration of each</h2>'
        f'<div id="legend"></div>{timelines}<p class="note">A steady iteration near the median of each log, for the '
        "replica that computes the longest, on one time scale. Ctrl + wheel or a drag zooms both, a double click shows "
        f"all; keys + − ← → 0.</p></section>{data('difference-data', facts)}{looks()}"
        f'<script type="text/plain" id="columns">{packed.text}</script>'
    )


def _logged(runs: Sequence[Timed]) -> tuple[IterationTime, IterationTime] | None:
    """None where one has no line but the first, or where only one has a batch that changes."""
    times = [run.time for run in runs if run.time is not None and not run.time.alone]
    if len(times) < 2 or times[0].per_sample != times[1].per_sample:
        return None
    return times[0], times[1]


def _table(before: Usual, after: Usual) -> str:
    least = SMALL * before.iteration_ms
    found = [one for one in changes(before, after) if abs(one.more) >= least]
    if not found:
        return '<p class="none">No stage differs.</p>'
    largest = max(abs(one.more) for one in found)
    head = ("stage", "kind", "A ms", "B ms", "B − A ms", "B − A %")
    rows = [_row(one, largest, least) for one in found]
    drawn = table(head, rows[:MOST_ROWS], kind="changes")
    if len(rows) > MOST_ROWS:
        more = table(head, rows[MOST_ROWS:], kind="changes")
        drawn += f"<details><summary>{plural(len(rows) - MOST_ROWS, 'more change')}</summary>{more}</details>"
    return drawn


def _row(one: Change, largest: float, least: float) -> Row:
    share = 100 * abs(one.more) / largest
    percent = f"{100 * one.more / one.before:+,.1f}" if one.before >= least else "–"
    return (
        _place(one),
        one.kind,
        Cell(f"{one.before:,.1f}", ' class="number"'),
        Cell(f"{one.after:,.1f}", ' class="number"'),
        Cell(f"{one.more:+,.1f}", f' class="number bar" style="--share: {share:.1f}%"'),
        Cell(percent, ' class="number"'),
    )


def _place(one: Change) -> str:
    if one.rank is None:
        return one.stage or "all"
    shared = f" and {plural(one.others, 'other')}" if one.others else ""
    return f"{one.stage}, rank {one.rank}{shared}"


def _ranks(run: Timed) -> list[int]:
    """The replica that computes longest, by stage; of a stage that has no such replica its first."""
    slowest = slowest_first(run.figures, [rank.dp for rank in run.plan.ranks])[0]
    found = {(rank.stage, rank.tp): rank.rank for rank in reversed(run.plan.ranks)}
    found |= {(rank.stage, rank.tp): rank.rank for rank in run.plan.ranks if rank.dp == slowest}
    return [found[place] for place in sorted(found)]


def _shown(run: Timed) -> int:
    return int(run.figures.iterations[run.figures.middle or 0])


def _columns(run: Timed, names: Sequence[str]) -> pd.DataFrame:
    """The events of the iteration that is shown, as columns of integers; `stage` is the row."""
    row_of = {rank: row for row, rank in enumerate(_ranks(run))}
    events = run.timeline.events.assign(waiting=run.figures.waiting_ns)
    some = events[(events["iteration"] == _shown(run)) & events["rank"].isin(row_of)]
    return pd.DataFrame(
        {
            "stage": some["rank"].map(row_of),
            "name": [names.index(name) for name in some["name"]],
            "start": some["start_ns"] - run.figures.start_ns[run.figures.middle or 0],
            "duration": some["end_ns"] - some["start_ns"],
            **{key: some[key] for key in ("chunk", "micro_batch", "peer", "waiting")},
        }
    )


def _facts(run: Timed, events: int) -> dict[str, object]:
    places = {rank.rank: rank for rank in run.plan.ranks}
    ranks = [places[rank] for rank in _ranks(run)]
    return {
        "events": events,
        "rows": [
            {"label": f"stage {rank.stage} · rank {rank.rank}", "short": f"rank {rank.rank}", "stage": rank.stage}
            for rank in ranks
        ],
        "length_ns": int(run.figures.length_ns[run.figures.middle or 0]),
        "micro_batches": run.micro_batches,
        "chunks": run.plan.chunks,
    }
