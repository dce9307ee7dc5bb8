"""What the GPUs of a run did: utilisation, power, memory, temperature."""

from __future__ import annotations

import math
from html import escape

from reports.figures.chart import Series, lines
from reports.figures.embed import NOTHING, embedded
from reports.figures.page import bullets, table
from reports.readers.gpus import GpuReport, GpuUse
from reports.sections.plan_section import plural

MOST = 16
"""Of more GPUs, so many are listed, those with the lowest utilisation first."""


def gpu_section(report: GpuReport) -> str:
    """The section of a run's page, as HTML."""
    told = [use for use in report.uses if not math.isnan(use.utilisation)]
    ordered = sorted(report.uses, key=lambda use: (use.fault is None, math.isnan(use.utilisation), use.utilisation))
    if told:
        lowest = min(told, key=lambda use: use.utilisation)
        mean = sum(use.utilisation for use in told) / len(told)
        said = (
            f"{plural(len(report.uses), 'GPU')}, {mean:.0f} % utilised on average; the least was GPU {lowest.index} of "
            f"{lowest.node} with {lowest.utilisation:.0f} %."
        )
    else:
        said = "No GPU told how much it was utilised."
    troubles = f'<div class="bad">{bullets(report.troubles)}</div>' if report.troubles else ""
    head = ("node", "GPU", "name", "utilisation %", "power W", "most memory MiB", "hottest °C", "fault")
    shown = f'<p class="note">the {MOST} least utilised of {len(ordered)}</p>' if len(ordered) > MOST else ""
    charts = "".join(
        _course(Series(title, report.at_h, values), title)
        for title, values in (("Mean utilisation, %", report.utilisation), ("Power of all GPUs, W", report.power_w))
        if report.at_h
    )
    note = (
        "Medians over the readings in which the run computed. Utilisation is the share of time in which a kernel ran, "
        "also one that only waits for another GPU; low power with high utilisation means waiting."
    )
    if report.uses and not report.at_h:
        note += " The readings have no times, so that no course of them can be drawn."
    return (
        f'<section><h2>GPUs</h2><p>{escape(said)}</p>{troubles}<div class="charts">{charts}</div>{shown}'
        f'{table(head, [_row(use) for use in ordered[:MOST]])}<p class="note">{escape(note)}</p></section>'
    )


def _course(series: Series, title: str) -> str:
    if not series.known:
        return NOTHING
    return embedded(lines([series], x_title="hours", title=title, from_zero=True), f"{title} over hours")


def _row(use: GpuUse) -> tuple[str, ...]:
    return (
        use.node,
        str(use.index),
        use.name,
        _number(use.utilisation),
        f"{_number(use.power_w)} of {_number(use.power_limit_w)}",
        f"{_number(use.memory_mib)} of {_number(use.memory_total_mib)}",
        _number(use.temperature_c),
        use.fault or "",
    )


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}"
