"""How a run went from iteration to iteration: loss, time, throughput."""

from __future__ import annotations

import numpy as np
import pandas as pd

from reports.facts.statistics import Statistics
from reports.figures.chart import lines
from reports.figures.embed import NOTHING, embedded
from reports.readers.record import Record

SEEN = "first to last event"
MOST_STAGES = 4
"""Whose memory is drawn, which is as many as there are colours."""


def course_section(record: Record, figures: Statistics) -> str:
    """The section of a run's page, as HTML."""

    def logged(name: str, key: str) -> pd.Series:
        return record.known(key).rename(name)

    seen = pd.Series(figures.length_ns / 1e6, figures.iterations, name=SEEN)
    time = [logged("mean between log lines", "elapsed_ms"), *([seen] if len(seen) else [])]
    losses = [logged("loss", "loss")]
    for data in ("validation", "test"):
        found = [one for one in (record.upstream.evaluations if record.upstream else ()) if one.data == data]
        losses += [pd.Series({one.iteration: one.loss for one in found}, name=data)] if found else []
    charts = [
        _chart(losses, "Loss", "Loss", from_zero=False),
        _chart(time, "Iteration time, ms", "Iteration time in milliseconds", from_zero=True),
        _chart([logged("tokens per second", "tokens_per_s")], "Tokens per second", "Tokens per second", from_zero=True),
        _chart(
            [logged("samples per second", "samples_per_s")], "Samples per second", "Samples per second", from_zero=True
        ),
        _chart([logged("gradient norm", "grad_norm")], "Gradient norm", "Gradient norm", from_zero=True),
        _chart(_memory(record), "Memory of a rank, GiB", "Peak memory over a stage's ranks, in GiB,", from_zero=True),
        _chart([logged("power", "power_w_per_rank")], "Power of a GPU, W", "Power of a GPU in watts", from_zero=True),
    ]
    drawn = "".join(charts) or NOTHING
    return f'<section><h2>Course</h2><div class="charts">{drawn}</div></section>'


def _memory(record: Record) -> list[pd.Series]:
    """Of each stage the most that one of its ranks took, GiB; of many stages those that took most. Nothing of a
    rehearsal, whose ranks hold no model."""
    if record.plan.rehearsal is not None:
        return []
    stages = {place.rank: place.stage for place in record.plan.ranks}
    courses: dict[int, list[pd.Series]] = {}
    for rank, course in record.memory_course.items():
        if len(course):
            courses.setdefault(stages[rank], []).append(course)
    most = {stage: pd.concat(ranks, axis=1).max(axis=1) / 1024 for stage, ranks in courses.items()}
    fullest = sorted(most, key=lambda stage: -most[stage].max())[:MOST_STAGES]
    return [most[stage].rename(f"stage {stage}") for stage in sorted(fullest)]


def _chart(series: list[pd.Series], title: str, label: str, *, from_zero: bool) -> str:
    """A chart; nothing where no number is known, as of a rehearsal's loss or of a log that tells no tokens."""
    if not any(np.isfinite(one).any() for one in series):
        return ""
    return embedded(
        lines(series, x_title="iteration", title=title, from_zero=from_zero, dots=[SEEN]), f"{label} over iterations"
    )
