"""Quality against epochs and against time, a line for each run."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from reports.facts.learning import DOLLARS, EPOCHS, HOURS, SAMPLES
from reports.facts.side_by_side import Compared
from reports.figures.chart import lines
from reports.figures.embed import embedded


def curves_section(runs: Sequence[Compared]) -> str:
    """Of every metric that any run was evaluated by, as HTML; of epochs where all have them, else of samples."""
    evaluated = [run for run in runs if not run.facts.learned.evaluations.empty]
    metrics = dict.fromkeys(name for run in evaluated for name in run.facts.learned.metrics)
    charts = []
    for metric in metrics:
        having = [run for run in evaluated if metric in run.facts.learned.evaluations]
        in_epochs = all(EPOCHS in run.facts.learned.evaluations for run in having)
        for axis in (EPOCHS if in_epochs else SAMPLES, HOURS, DOLLARS):
            if all(axis in run.facts.learned.evaluations for run in having):
                title = f"{metric} over {axis}"
                drawn = lines([_curve(run, metric, axis) for run in having], x_title=axis, title=title)
                charts.append(embedded(drawn, title))
    if not charts:
        return ""
    note = '<p class="note">The axes of metrics do not begin at 0.</p>'
    return f'<section><h2>Quality</h2><div class="charts">{"".join(charts)}</div>{note}</section>'


def _curve(run: Compared, metric: str, axis: str) -> pd.Series:
    evaluations = run.facts.learned.evaluations
    return pd.Series(evaluations[metric].to_numpy(), evaluations[axis].to_numpy(), name=run.name).dropna()
