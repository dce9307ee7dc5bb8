"""What is published of the same models, beside what these runs reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from reports.facts.published import Published, published
from reports.facts.side_by_side import Compared, Facts, speed_up
from reports.figures.page import Row, number, table

_NOTE = (
    "Here: the throughput of the fastest of these runs with the same replicas, relative to the fastest data-parallel "
    "run. Both are medians, and a difference within the ± of their samples/s may be chance."
)


def published_section(runs: Sequence[Compared]) -> str:
    """As HTML; empty where nothing is published of the models of these runs on as many workers."""
    every = [run.facts for run in runs]
    rows: list[Row] = [
        (
            one.model,
            str(one.workers),
            one.where,
            one.replicas,
            one.of,
            f"{one.speed_up:g}",
            number(_reached(one, every), ".2f"),
            one.source,
        )
        for one in published(every)
    ]
    if not rows:
        return ""
    head = ("model", "workers", "network", "replicas", "of", "published times data parallelism", "here", "source")
    drawn = table(head, rows, kind="published")
    return f'<section><h2>Published</h2>{drawn}<p class="note">{escape(_NOTE)}</p></section>'


def _reached(one: Published, runs: Sequence[Facts]) -> float:
    same = [run for run in runs if (run.model, run.workers) == (one.model, one.workers)]
    found = [speed_up(run, runs) for run in same if "-".join(map(str, run.replicas)) == one.replicas]
    return max((value for value in found if not math.isnan(value)), default=math.nan)
