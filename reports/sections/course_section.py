"""How a run went from iteration to iteration: loss, time, throughput."""

from __future__ import annotations

from reports.facts.statistics import Statistics
from reports.figures.chart import Series, lines
from reports.figures.embed import NOTHING, embedded
from reports.readers.record import Record


def course_section(record: Record, figures: Statistics) -> str:
    """The section of a run's page, as HTML."""

    def logged(name: str, key: str) -> Series:
        known = record.known(key)
        return Series(name, known.index.tolist(), known.tolist())

    seen = Series("first to last event", figures.iterations.tolist(), (figures.length_ns / 1e6).tolist(), line=False)
    time = [logged("mean between log lines", "elapsed_ms"), *([seen] if len(figures.iterations) else [])]
    losses = [logged("loss", "loss")]
    for data in ("validation", "test"):
        found = [one for one in (record.upstream.evaluations if record.upstream else ()) if one.data == data]
        losses += [Series(data, [one.iteration for one in found], [one.loss for one in found])] if found else []
    charts = [
        _chart(losses, "Loss", "Loss", from_zero=False),
        _chart(time, "Iteration time, ms", "Iteration time in milliseconds", from_zero=True),
        _chart([logged("tokens per second", "tokens_per_s")], "Tokens per second", "Tokens per second", from_zero=True),
        _chart([logged("gradient norm", "grad_norm")], "Gradient norm", "Gradient norm", from_zero=True),
        _chart([logged("power", "power_w_per_rank")], "Power of a GPU, W", "Power of a GPU in watts", from_zero=True),
    ]
    drawn = "".join(charts) or NOTHING
    return f'<section><h2>Course</h2><div class="charts">{drawn}</div></section>'


def _chart(series: list[Series], title: str, label: str, *, from_zero: bool) -> str:
    """A chart; nothing where no number is known, as of a rehearsal's loss or of a log that tells no tokens."""
    if not any(one.known for one in series):
        return ""
    return embedded(lines(series, x_title="iteration", title=title, from_zero=from_zero), f"{label} over iterations")
