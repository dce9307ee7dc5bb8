"""The ranks that failed, those that failed alike together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conf.run_folder.rank_ranges import rank_ranges
from megatron_ext.contract.failure import RankFailure
from reports.figures.page import table
from reports.sections.findings_section import some_nodes

HEAD = ("rank", "node", "kind", "error", "message")


def failures_section(failures: Sequence[RankFailure]) -> str:
    """The section of a run's page, as HTML; nothing without failures. Messages that differ only in numbers, such as
    addresses, are one row with the first of them; causes come before what they caused."""
    if not failures:
        return ""
    alike: dict[tuple[bool, str, str], list[RankFailure]] = {}
    for one in sorted(failures, key=lambda one: (one.symptom, one.rank)):
        alike.setdefault((one.symptom, one.type, re.sub(r"\d+", "#", one.message)), []).append(one)
    rows = [
        (
            rank_ranges(one.rank for one in ranks),
            some_nodes(list(dict.fromkeys(one.node for one in ranks))),
            "caused by another" if symptom else "cause",
            type_,
            ranks[0].message,
        )
        for (symptom, type_, _), ranks in alike.items()
    ]
    return f"<section><h2>Failed ranks</h2>{table(HEAD, rows)}</section>"
