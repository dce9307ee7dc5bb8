"""With which nodes an elastic run went on, and why."""

from __future__ import annotations

from collections.abc import Sequence

from reports.figures.page import Row, table
from reports.readers.decisions import Regrouping
from reports.readers.record import Record

HEAD = ("start", "from iteration", "nodes", "without", "with again", "shares", "reason")


def elastic_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that kept its plan."""
    if not record.regroupings:
        return ""
    return f"<section><h2>Nodes</h2>{table(HEAD, map(_row, record.regroupings))}</section>"


def _row(one: Regrouping) -> Row:
    return (
        one.start,
        str(one.iteration),
        f"{len(one.nodes_before)} → {len(one.nodes)}",
        _others(one.nodes_before, one.nodes),
        _others(one.nodes, one.nodes_before),
        f"{_dashed(one.shares_before)} → {_dashed(one.shares)}",
        one.reason,
    )


def _others(nodes: Sequence[str], beside: Sequence[str]) -> str:
    return ", ".join(node for node in nodes if node not in beside) or "–"


def _dashed(shares: Sequence[int]) -> str:
    return "-".join(map(str, shares))
