"""What a run learned, by its evaluations, for the samples, the time and the dollars that it took."""

from __future__ import annotations

import pandas as pd

from reports.figures.chart import lines
from reports.figures.embed import embedded
from reports.readers.hardware import price
from reports.readers.record import Record

EVALUATED = "valid_"
"""Before the names of what an evaluation gives, in metrics.jsonl."""
LOSS = f"{EVALUATED}loss"
_MS_PER_HOUR = 3.6e6


def learning_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty without an evaluation."""
    metrics = record.metrics
    names = [name for name in metrics if name.startswith(EVALUATED) and metrics[name].notna().any()]
    if not names or not {"loss", "elapsed_ms", "consumed_samples"} <= set(metrics):
        return ""
    spent = axes(record)
    charts = []
    if LOSS in names:
        for axis in spent:
            losses = [_by(axis, metrics["loss"], "training"), _by(axis, metrics[LOSS], "valid")]
            charts.append(_chart(losses, "Loss", axis))
    for name in names:
        if name != LOSS:
            title = name.removeprefix(EVALUATED)
            charts.append(_chart([_by(spent[0], metrics[name], title)], title, spent[0]))
    return f'<section><h2>Learning</h2><div class="charts">{"".join(charts)}</div></section>'


def axes(record: Record) -> list[pd.Series]:
    """By logged line: samples consumed; hours of iterations and evaluations; dollars, where the prices are known."""
    metrics = record.metrics
    iterations = metrics["iteration"].astype(float)
    hours = (metrics["elapsed_ms"].astype(float) * iterations.diff().fillna(iterations)).cumsum() / _MS_PER_HOUR
    if "evaluation_s" in metrics:
        hours += metrics["evaluation_s"].astype(float).fillna(0.0).cumsum() / 3600
    found = [metrics["consumed_samples"].astype(float).rename("samples"), hours.rename("hours")]
    if record.experiment is not None:
        cost = price(record.plan, record.experiment)
        if not cost.unknown:
            found.append((hours * cost.per_hour).rename("dollars"))
    return found


def _by(axis: pd.Series, values: pd.Series, name: str) -> pd.Series:
    """Known values, by what had been spent for them."""
    return pd.Series(values.astype(float).to_numpy(), axis.to_numpy(), name=name).dropna()


def _chart(series: list[pd.Series], title: str, axis: pd.Series) -> str:
    label = f"{title} over {axis.name}"
    return embedded(lines(series, x_title=str(axis.name), title=label, from_zero=False), label)
