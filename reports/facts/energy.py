"""What energy a run has taken, from the readings of its GPUs' power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from megatron_ext.contract.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The GPUs' energy; processors, memory and cooling come in addition."""

    kwh: float
    hours: float
    """How long the GPU was read that was read for the longest time."""
    gpus: int
    by_stage: Mapping[int, float]
    """kWh by stage, of the GPUs that are a rank's."""
    watts: float
    """The mean of all GPUs together."""
    counter: float | None
    """What the GPUs' own counters say of the time between readings, divided by what the readings of their power make of
    it; None where no driver counts."""

    def kwh_per_million_tokens(self, tokens_per_s: float) -> float:
        """Returns what a million tokens take at the speed of the run."""
        return self.watts / tokens_per_s / 3.6


def energy_of(readings: pd.DataFrame, plan: Plan) -> Energy | None:
    """Returns what the readings show; None where no GPU told its power.

    Args:
        readings: `GpuReport.energy`.
    """
    if readings.empty or not readings["hours"].sum():
        return None
    ranks = {node.name: node.ranks for node in plan.nodes}
    by_stage: dict[int, float] = {}
    for row in readings.itertuples():
        own = ranks.get(str(row.node), [])
        if int(row.place) < len(own):
            stage = plan.ranks[own[int(row.place)]].stage
            by_stage[stage] = by_stage.get(stage, 0.0) + float(row.kwh)
    watts = (readings["kwh"] / readings["hours"]).sum() * 1000
    return Energy(
        kwh=float(readings["kwh"].sum()),
        hours=float(readings["hours"].max()),
        gpus=len(readings),
        by_stage=dict(sorted(by_stage.items())),
        watts=float(watts),
        counter=float(readings["counted_kwh"].sum() / beside) if (beside := readings["beside_kwh"].sum()) else None,
    )
