"""How the global batch and the shares of replicas changed while a run went on, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from reports.facts.labels import dashed
from reports.figures.chart import lines
from reports.figures.embed import embedded
from reports.figures.page import Row, number, table
from reports.readers.json_lines import Decision, Regrouping
from reports.readers.record import Record

SAMPLES = "consumed_samples"
HEAD = ("iteration", "samples", "global batch", "shares", "learning rate ×", "similarity", "noise scale", "reason")


def adaptive_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that made no decision."""
    made = record.decisions
    if not made:
        return ""
    charts = [
        _chart([_batches(record)], "Global batch", from_zero=True),
        _chart([_decided(made, "noise scale", lambda one: one.noise_scale)], "Noise scale (samples)", from_zero=True),
        _chart([_decided(made, "similarity", lambda one: one.similarity)], "Similarity of the halves"),
        _chart([_logged(record, "learning_rate", "learning rate")], "Learning rate", from_zero=True),
    ]
    changes = [one for one in made if one.changes]
    kept = len(made) - len(changes)
    note = f'<p class="note">{kept} of {len(made)} decisions did not change anything.</p>' if kept else ""
    return (
        f'<section><h2>Adaptation</h2><div class="charts">{"".join(charts)}</div>'
        f"{table(HEAD, map(_row, changes)) if changes else ''}{note}</section>"
    )


def _batches(record: Record) -> pd.Series:
    """Over consumed samples, in steps: a log line has only the batch of its last iteration."""
    points = [(0, record.decisions[0].before)]
    for one in record.decisions:
        points += [(one.consumed_samples, one.before), (one.consumed_samples, one.global_batch_size)]
    logged = record.known(SAMPLES)
    points.append((max(points[-1][0], *map(int, logged.tail(1))), points[-1][1]))
    return pd.Series([batch for _, batch in points], [samples for samples, _ in points], name="global batch")


def _logged(record: Record, key: str, name: str) -> pd.Series:
    """Returns a logged figure over consumed samples."""
    metrics = record.metrics
    if key not in metrics or SAMPLES not in metrics:
        return pd.Series(dtype="float64", name=name)
    return pd.Series(metrics[key].astype(float).to_numpy(), metrics[SAMPLES].to_numpy(), name=name).dropna()


def _decided(made: Sequence[Decision], name: str, value: Callable[[Decision], float | None]) -> pd.Series:
    known = {one.consumed_samples: found for one in made if (found := value(one)) is not None}
    return pd.Series(list(known.values()), list(known), name=name, dtype="float64")


def _chart(series: Sequence[pd.Series], title: str, *, from_zero: bool = False) -> str:
    """Nothing where no number is known, as of shares alone."""
    if not any(len(one) for one in series):
        return ""
    figure = lines(series, x_title="samples", title=title, from_zero=from_zero)
    return embedded(figure, f"{title} over samples")


def _row(one: Decision) -> Row:
    return (
        str(one.iteration),
        f"{one.consumed_samples:,}",
        f"{one.before} → {one.global_batch_size}" if one.before != one.global_batch_size else str(one.before),
        f"{dashed(one.shares_before)} → {dashed(one.shares)}"
        + (
            f" of {dashed(one.micro_batch_sizes_before)} → {dashed(one.micro_batch_sizes)} samples"
            if one.resizes
            else ""
        )
        + (f" in {dashed(one.streams_before)} → {dashed(one.streams)} streams" if one.changes_streams else ""),
        number(one.learning_rate_factor, ".4g"),
        number(one.similarity, ".3f"),
        number(one.noise_scale, ",.4g"),
        one.reason,
    )


NODES_HEAD = ("start", "from iteration", "nodes", "without", "with again", "shares", "reason")


def elastic_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that kept its plan."""
    if not record.regroupings:
        return ""
    return f"<section><h2>Nodes</h2>{table(NODES_HEAD, map(_nodes_row, record.regroupings))}</section>"


def _nodes_row(one: Regrouping) -> Row:
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
