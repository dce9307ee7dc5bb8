"""How evenly a model's routers share tokens out to experts: the newest line by layer, and the extremes over the run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from reports.figures.chart import lines
from reports.figures.embed import RAISED, SERIES, embedded, figure
from reports.readers.record import Record


def experts_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that counted no experts."""
    if not record.expert_loads:
        return ""
    newest = max(record.expert_loads)
    return (
        '<section><h2>Experts</h2><p class="note">Tokens of an expert, over the mean of its layer: 1 is even, 0 is an '
        f'expert that no token chose.</p><div class="charts">{_by_layer(record.expert_loads[newest], newest)}'
        f"{_over_iterations(record)}</div></section>"
    )


def _by_layer(loads: Sequence[Sequence[float]], iteration: int) -> str:
    rows = len(loads)
    title = f"Load by layer and expert, iteration {iteration}"
    made = figure(title=title, height=min(560, 110 + 22 * rows))
    made.add_heatmap(
        z=[list(row) for row in loads],
        x=list(range(len(loads[0]))),
        y=[str(row) for row in range(rows)],
        zmin=0,
        zmax=max(2.0, *(value for row in loads for value in row)),
        colorscale=[[0, RAISED], [1, SERIES[0]]],
        hovertemplate="layer %{y}, expert %{x}: %{z:.3f}<extra></extra>",
    )
    made.update_xaxes(title_text="expert")
    made.update_yaxes(title_text="layer with experts", autorange="reversed", type="category")
    return embedded(made, title)


def _over_iterations(record: Record) -> str:
    """The busiest and the idlest expert of any layer."""
    series = [
        pd.Series({at: float(choose(loads)) for at, loads in record.expert_loads.items()}, name=name)
        for name, choose in (("busiest", np.max), ("idlest", np.min))
    ]
    made = lines(series, x_title="iteration", title="Load of the busiest and the idlest expert", from_zero=True)
    return embedded(made, "Load of the busiest and the idlest expert over iterations")
