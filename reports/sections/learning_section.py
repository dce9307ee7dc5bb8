"""What a run learned, by its evaluations, for the samples, the time and the dollars that it took."""

from __future__ import annotations

import pandas as pd

from reports.facts.learning import DOLLARS, EVALUATED, HOURS, SAMPLES, spent
from reports.figures.chart import lines
from reports.figures.embed import embedded
from reports.readers.record import Record

LOSS = f"{EVALUATED}loss"


def learning_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty without an evaluation."""
    metrics = record.metrics
    names = [name for name in metrics if name.startswith(EVALUATED) and metrics[name].notna().any()]
    if not names or not {"loss", "elapsed_ms", "consumed_samples"} <= set(metrics):
        return ""
    charts = []
    for name in sorted(names, key=lambda name: name != LOSS):
        title = name.removeprefix(EVALUATED)
        for axis in axes(record):
            if name == LOSS:
                losses = [_by(axis, metrics["loss"], "training"), _by(axis, metrics[LOSS], "valid")]
                charts.append(_chart(losses, "Loss", axis))
            else:
                charts.append(_chart([_by(axis, metrics[name], title)], title, axis))
    return f'<section><h2>Learning</h2><div class="charts">{"".join(charts)}</div></section>'


def axes(record: Record) -> list[pd.Series]:
    """By logged line: samples consumed; hours of iterations and evaluations; dollars, where the prices are known."""
    known = spent(record)
    return [known[name] for name in (SAMPLES, HOURS, DOLLARS) if name in known]


def _by(axis: pd.Series, values: pd.Series, name: str) -> pd.Series:
    """Known values, by what had been spent for them."""
    return pd.Series(values.astype(float).to_numpy(), axis.to_numpy(), name=name).dropna()


def _chart(series: list[pd.Series], title: str, axis: pd.Series) -> str:
    label = f"{title} over {axis.name}"
    return embedded(lines(series, x_title=str(axis.name), title=label, from_zero=False), label)
