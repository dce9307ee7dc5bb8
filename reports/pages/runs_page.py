"""The list of runs that a server shows: how each stands, a link to its page, and which of them to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from conf.visible import plural
from reports.figures.page import Cell, Row, page, static, table

HEAD = ("", "run", "state", "iteration", "end", "loss", "ms/iteration", "kind", "age", "took", "plan", "note")


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """A run in the list; all of it plain text."""

    name: str
    link: str | None
    """To its page; None where it has none."""
    state: str
    tone: str
    """good, bad or open: a class of the style sheet."""
    iteration: str = "–"
    progress: float = 0.0
    """From 0 to 1."""
    loss: str = "–"
    ms: str = "–"
    outlook: str = ""
    """When it starts or ends."""
    kind: str = ""
    age: str = ""
    took: str = ""
    plan: str = ""
    note: str = ""


def render(runs: Sequence[RunLine], where: str) -> str:
    """The page, as HTML; `where` is the folder of the runs."""
    body = [
        f'<header><p class="crumbs">{escape(where)}</p><h1>{plural(len(runs), "run")}</h1></header><main class="wide">',
        _table(runs) if runs else '<section><p class="none">No runs yet. Start one with tdpp launch.</p></section>',
        "</main>",
    ]
    return page(f"{plural(len(runs), 'run')} – tdpp", "\n".join(body), [static("runs.js")])


def _table(runs: Sequence[RunLine]) -> str:
    drawn = table(HEAD, [_row(run) for run in runs], kind="runs")
    button = '<p><button id="compare">Compare</button> <span class="note">the selected runs</span></p>'
    return f'<section><form action="compare" method="get">{button}{drawn}</form></section>'


def _row(run: RunLine) -> Row:
    name = escape(run.name)
    tick = f'<input type="checkbox" name="run" value="{name}" aria-label="compare {name}">' if run.link else ""
    share = f' class="number bar" style="--share: {run.progress:.1%}"'
    return (
        Cell(tick),
        Cell(f'<a class="whole" href="{escape(run.link)}">{name}</a>' if run.link else name),
        Cell(f'<b class="state {escape(run.tone)}">{escape(run.state)}</b>'),
        Cell(escape(run.iteration), share),
        run.outlook,
        Cell(escape(run.loss), ' class="number"'),
        Cell(escape(run.ms), ' class="number"'),
        run.kind,
        run.age,
        run.took,
        run.plan,
        run.note,
    )
