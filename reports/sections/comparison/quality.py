"""What runs had spent when they first reached a quality."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from conf.visible import span
from reports.facts.learning import DOLLARS, EPOCHS, HOURS, SAMPLES, Reached, time_to_quality
from reports.facts.side_by_side import Compared
from reports.figures.page import Cell, Row, number, table

_FORMS = {"iteration": ",.0f", SAMPLES: ",.0f", EPOCHS: ",.2f", HOURS: "", DOLLARS: ",.4g"}
_NOTE = (
    "The first evaluation that reached a quality. Qualities are the best value of the worst run, the best value of "
    "the best run, and the goal of train.until; time counts iterations and evaluations."
)


def quality_section(runs: Sequence[Compared]) -> str:
    """As HTML; empty where no run has evaluations of a metric whose direction is known."""
    rows = time_to_quality([run.facts.learned for run in runs])
    if not rows:
        return ""
    shown = [name for name in _FORMS if any(row.at is not None and name in row.at for row in rows)]
    cells: list[Row] = [(_quality(row), Cell(runs[row.run].link), *_spent(row, shown)) for row in rows]
    heads = ("time" if name == HOURS else name for name in shown)
    drawn = table(("quality", "run", *heads), cells, kind="quality")
    return f'<section><h2>Time to quality</h2>{drawn}<p class="note">{escape(_NOTE)}</p></section>'


def _quality(row: Reached) -> str:
    return f"{row.metric} {'≥' if row.larger else '≤'} {row.quality:.6g}"


def _spent(row: Reached, shown: Sequence[str]) -> list[str | Cell]:
    if row.at is None:
        return [Cell("not reached", f' class="number" colspan="{len(shown)}"')]
    return [Cell(_text(name, row.at.get(name)), ' class="number"') for name in shown]


def _text(name: str, spent: float | None) -> str:
    if name == HOURS and spent is not None:
        return span(3600 * spent, 3)
    return number(spent, _FORMS[name])
