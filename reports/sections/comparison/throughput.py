"""How long an epoch takes, and throughput as measured, as predicted, and against data parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from reports.facts.side_by_side import Compared, Facts, speed_up
from reports.figures.page import Cell, Row, number, table

_NOTE = (
    "An epoch counts its iterations, without evaluations. Data parallelism: the fastest of these runs that has the "
    "whole model on each of the same number of workers. Busy: the fraction of an iteration in which ranks on these "
    "GPUs compute. Ratios are of medians: what differs by no more than both ± of the samples/s may differ by chance."
)


def samples_per_s(one: Facts) -> str:
    """With ± and the number of log lines; of a batch that adapts the mean over the whole run."""
    doubt = "" if one.speed is None else f" {one.speed.doubt(lambda half: f'{half:,.1f}')}"
    return f"{number(one.samples_per_s, ',.1f')}{doubt}"


def throughput_section(runs: Sequence[Compared]) -> str:
    """As HTML; empty where nothing but the samples a second is known."""
    runs = [run for run in runs if run.facts.samples_per_s > 0]
    every = [run.facts for run in runs]
    rows = {
        "epoch s": [number(one.epoch_s, ",.1f") for one in every],
        "samples/s": [samples_per_s(one) for one in every],
        "predicted samples/s": [number(one.predicted_samples_per_s, ",.1f") for one in every],
        "measured / predicted": [number(one.samples_per_s / one.predicted_samples_per_s, ".2f") for one in every],
        "times data parallelism": [number(speed_up(one, every), ".2f") for one in every],
    }
    types = [*dict.fromkeys(gpu for one in every for gpu in one.busy)]
    rows |= {f"{gpu} busy": [number(one.busy.get(gpu, math.nan), ".0%") for one in every] for gpu in types}
    others = [value for one in every for value in (one.epoch_s, one.predicted_samples_per_s)]
    if not types and all(math.isnan(value) for value in others):
        return ""
    known = {title: cells for title, cells in rows.items() if set(cells) != {"–"}}
    cells: list[Row] = [(Cell(run.link), *(values[at] for values in known.values())) for at, run in enumerate(runs)]
    drawn = table(("run", *known), cells, kind="numeric throughput")
    return f'<section><h2>Throughput</h2>{drawn}<p class="note">{escape(_NOTE)}</p></section>'
