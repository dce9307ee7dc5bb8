"""What the GPUs of a run did: utilisation, power, energy, memory, temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from conf.run_folder.gpu_lines import GpuEnergy
from conf.visible import plural
from megatron_ext.contract.plan import Plan
from reports.figures.chart import lines
from reports.figures.embed import NOTHING, embedded
from reports.figures.page import bullets, number, table
from reports.readers.gpus import GpuReport
from reports.readers.record import Record
from reports.sections.figures_section import settled

MOST = 16
"""So many GPUs are listed, those with the lowest utilisation first."""


def gpu_section(report: GpuReport, record: Record | None = None) -> str:
    """The section of a run's page, as HTML; with its `record` it says what the energy was for."""
    uses, course = report.uses, report.course
    known = uses["utilisation"].dropna()
    if len(known):
        lowest = uses.loc[known.idxmin()]
        message = (
            f"{plural(len(uses), 'GPU')}, {known.mean():.0f}% utilised on average; the least utilised was GPU "
            f"{lowest['index']} of {lowest['node']}, at {lowest['utilisation']:.0f}%."
        )
    else:
        message = "No GPU reported its utilisation."
    troubles = f'<div class="bad">{bullets(report.troubles)}</div>' if report.troubles else ""
    head = ("node", "GPU", "name", "utilisation %", "power W", "most memory MiB", "hottest °C", "fault")
    shown = f'<p class="note">The {MOST} least utilised of {len(uses)} GPUs.</p>' if len(uses) > MOST else ""
    titles = {"utilisation": "Mean utilisation, %", "power_w": "Power of all GPUs, W"}
    charts = "".join(_course(course[key].rename(title)) for key, title in titles.items() if len(course))
    note = (
        "Medians over the readings in which the run computed. Utilisation is the fraction of time in which a kernel "
        "ran, even one that only waits for another GPU; low power at high utilisation means waiting."
    )
    if len(uses) and not len(course):
        note += " The readings have no times, so they cannot be drawn over time."
    ordered = uses.assign(sound=uses["fault"].isna()).sort_values(["sound", "utilisation"], kind="stable")
    rows = [_row(use) for _, use in ordered.head(MOST).iterrows()]
    return (
        f"<section><h2>GPUs</h2><p>{escape(message)}</p>{_energy(report, record)}{troubles}"
        f'<div class="charts">{charts}</div>{shown}'
        f'{table(head, rows)}<p class="note">{escape(note)}</p></section>'
    )


def _energy(report: GpuReport, record: Record | None) -> str:
    found = None if record is None else energy_of(report.energy, record.plan)
    if record is None or found is None:
        return ""
    parts = [f"{found.kwh:,.3g} kWh of {plural(found.gpus, 'GPU')} in {found.hours:,.3g} h of readings"]
    if found.counter is not None:
        parts[0] += f" (the GPUs' own counters: {found.counter - 1:+.1%})"
    tokens_per_s = settled(record, "tokens_per_s")
    if tokens_per_s:
        parts.append(f"{found.kwh_per_million_tokens(tokens_per_s):,.3g} kWh per million tokens")
    if len(found.by_stage) > 1:
        parts.append(", ".join(f"stage {stage} {kwh:,.3g} kWh" for stage, kwh in found.by_stage.items()))
    factor = record.experiment.cluster.carbon_g_per_kwh if record.experiment else None
    if factor is not None:
        parts.append(f"{found.kwh * factor / 1000:,.3g} kg CO₂ (cluster.carbon_g_per_kwh={factor:g})")
    return f"<p>Energy: {escape('; '.join(parts))}.</p>"


def _course(values: pd.Series) -> str:
    if not values.notna().any():
        return NOTHING
    drawn = lines([values], x_title="hours", title=str(values.name), from_zero=True)
    return embedded(drawn, f"{values.name} over hours")


def _row(use: pd.Series) -> tuple[str, ...]:
    def figure(key: str) -> str:
        return number(use[key], ",.0f")

    return (
        use["node"],
        str(use["index"]),
        use["name"],
        figure("utilisation"),
        f"{figure('power_w')} of {figure('power_limit_w')}",
        f"{figure('memory_mib')} of {figure('memory_total_mib')}",
        figure("temperature_c"),
        use["fault"] if pd.notna(use["fault"]) else "",
    )


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The GPUs' energy; processors, memory and cooling come in addition."""

    kwh: float
    hours: float
    """How long the GPU of a rank was read that was read for the longest time."""
    gpus: int
    by_stage: Mapping[int, float]
    """kWh by stage, of the GPUs that are a rank's."""
    watts: float
    """The mean of all GPUs together, without those of nodes that an elastic run has lost."""
    counter: float | None
    """What the GPUs' own counters say of the time between readings, divided by what the readings of their power make of
    it; None where no driver counts."""

    def kwh_per_million_tokens(self, tokens_per_s: float) -> float:
        """Returns what a million tokens take at the speed of the run."""
        return self.watts / tokens_per_s / 3.6


def energy_of(readings: Mapping[str, Sequence[GpuEnergy]], plan: Plan) -> Energy | None:
    """Returns what the readings show; None where no GPU told its power. `readings`: `GpuReport.energy`."""
    once = _once(readings)
    places: dict[tuple[str, int], list[GpuEnergy]] = {}
    for node, gpu in once:
        places.setdefault((node, gpu.place), []).append(gpu)
    hours = {place: total for place, own in places.items() if (total := sum(gpu.hours for gpu in own)) > 0}
    if not hours:
        return None
    kwh = {place: sum(gpu.kwh for gpu in places[place]) for place in hours}
    ranks = {node.name: node.ranks for node in plan.nodes}
    by_stage: dict[int, float] = {}
    for (node, place), taken in kwh.items():
        own = ranks.get(node, [])
        if place < len(own):
            stage = plan.ranks[own[place]].stage
            by_stage[stage] = by_stage.get(stage, 0.0) + taken
    beside = sum(gpu.beside_kwh for _, gpu in once)
    there = [place for place in hours if place[0] in ranks] or [*hours]  # those of lost nodes draw nothing now
    return Energy(
        kwh=sum(kwh.values()),
        hours=max(hours.values()),
        gpus=len({gpu.uuid for _, gpu in once}),
        by_stage=dict(sorted(by_stage.items())),
        watts=sum(kwh[place] / hours[place] for place in there) * 1000,
        counter=sum(gpu.counted_kwh for _, gpu in once) / beside if beside else None,
    )


def _once(readings: Mapping[str, Sequence[GpuEnergy]]) -> list[tuple[str, GpuEnergy]]:
    """Leaves out a GPU that another node read at the same time, for fewer hours."""
    kept: dict[str, list[tuple[str, GpuEnergy]]] = {}
    every = ((node, gpu) for node, gpus in readings.items() for gpu in gpus)
    for node, gpu in sorted(every, key=lambda one: -one[1].hours):
        own = kept.setdefault(gpu.uuid, [])
        if not any(
            other != node and gpu.begin_unix < known.end_unix and known.begin_unix < gpu.end_unix
            for other, known in own
        ):
            own.append((node, gpu))
    return [one for own in kept.values() for one in own]
