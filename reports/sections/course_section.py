"""How a run went from iteration to iteration: everything that it logged, one chart above the other."""

from __future__ import annotations

from fasop.simulation.predict import Prediction
from reports.facts.course import axes, beside, course
from reports.facts.statistics import Statistics
from reports.figures.course import course_charts
from reports.figures.embed import NOTHING
from reports.readers.record import Record


def course_section(
    record: Record, figures: Statistics, prediction: Prediction | None = None, before: Record | None = None
) -> str:
    """The section of a run's page, as HTML; `before` is a run whose lines are drawn beside its own."""
    charts = course(record, figures, prediction)
    if before is not None:
        charts = beside(charts, before)
    drawn = course_charts(charts, axes(record), axes(before) if before else None) if charts else NOTHING
    return f"<section><h2>Course</h2>{drawn}</section>"
