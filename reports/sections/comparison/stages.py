"""Memory and versions of the weights, stage by stage, of every run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from reports.facts.side_by_side import Compared
from reports.figures.page import Cell, Row, number, table_behind

_NOTE = (
    "Versions: the most versions of the stage's weights that are alive at once, known before a run starts. Ahead: "
    "forward passes before the first backward pass. Measured: the peak over the stage's ranks; on CPUs, of the whole "
    "process."
)


def stages_section(runs: Sequence[Compared]) -> str:
    """As HTML; empty where no run says what its stages are."""
    rows: list[Row] = [
        (
            Cell(run.link) if stage == 0 else "",
            str(stage),
            one.holds,
            str(one.replicas),
            "–" if one.ahead is None else str(one.ahead),
            str(one.versions),
            number(one.predicted_gib, ",.2f"),
            number(one.measured_gib, ",.2f"),
        )
        for run in runs
        for stage, one in enumerate(run.facts.stages)
    ]
    if not rows:
        return ""
    head = ("run", "stage", "holds", "replicas", "ahead", "versions", "predicted GiB", "measured GiB")
    drawn = table_behind(head, rows, f"Stages of all {len(runs)} runs", kind="stages")
    return f'<section><h2>Memory and versions</h2>{drawn}<p class="note">{escape(_NOTE)}</p></section>'
