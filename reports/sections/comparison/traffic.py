"""Bytes that runs sent for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron_ext.contract.traffic import KINDS
from reports.facts.side_by_side import Compared, Sent
from reports.figures.page import Cell, Row, table

_NOTE = (
    "Counted at the sender. Activations go to the next stage, and their gradients back. All-reduce: weight gradients; "
    "each rank sends as much as in a ring. Most of a rank: the rank that sends the most."
)


def traffic_section(runs: Sequence[Compared]) -> str:
    """As HTML; empty where no run counted them."""
    counted = [(run.link, run.facts.sent) for run in runs if run.facts.sent is not None]
    if not counted:
        return ""
    kinds = [kind for kind in KINDS if any(kind in sent.by_kind for _, sent in counted)]
    largest = max(sent.total for _, sent in counted)
    rows: list[Row] = [
        (
            Cell(link),
            *(size(sent.by_kind.get(kind, 0.0)) for kind in kinds),
            _bar(sent, largest),
            size(sent.most),
        )
        for link, sent in counted
    ]
    head = ("run", *(kind.replace("_", "-") for kind in kinds), "all", "most of a rank")
    drawn = table(head, rows, kind="numeric traffic")
    return f'<section><h2>Bytes sent per sample</h2>{drawn}<p class="note">{escape(_NOTE)}</p></section>'


def size(sent: float) -> str:
    """Bytes in the unit that fits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if sent >= scale:
            return f"{sent / scale:,.2f} {unit}"
    return f"{sent:,.0f} B"


def _bar(sent: Sent, largest: float) -> Cell:
    share = sent.total / largest * 100 if largest else 0
    return Cell(size(sent.total), f' class="number bar" style="--share: {share:.1f}%"')
