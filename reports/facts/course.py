"""What a run's course consists of: a chart for every key that it logged, and what its iterations had taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fasop.simulation.predict import Prediction
from reports.facts.learning import DOLLARS, EPOCHS, EVALUATED, HOURS, SAMPLES, spent
from reports.facts.statistics import Statistics
from reports.readers.record import Record

ITERATION, TOKENS = "iteration", "tokens"
MOST_STAGES = 4
"""Whose memory is drawn, which is as many as there are colours."""
TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "loss_scale": "Loss scale",
    "grad_norm": "Gradient norm",
    "elapsed_ms": "Iteration time, ms",
    "tokens_per_s": "Tokens per second",
    "samples_per_s": "Samples per second",
    "tflops_per_rank": "Model TFLOP/s per rank",
    "power_w_per_rank": "Power of a GPU, W",
    "energy_j_per_rank": "Energy of a GPU in an iteration, J",
    "evaluation_s": "Evaluation, s",
    "global_batch_size": "Global batch, samples",
    "consumed_samples": "Samples consumed",
    "cost": "Cost so far, $",
    "unix": "Clock time",
    "skipped": "Skipped iterations",
    "nan": "Iterations with NaN",
}
"""Titles of the keys that every engine logs; a task's own keep their names."""
LATE = ("learning_rate", "grad_norm", "loss_scale", "elapsed_ms", *[key for key in TITLES if key.endswith("_per_s")])
LAST = (
    *("tflops_per_rank", "power_w_per_rank", "energy_j_per_rank", "evaluation_s", "global_batch_size", "cost"),
    *("consumed_samples", "unix", "skipped", "nan"),
)
FROM_ZERO = ("elapsed_ms", "tokens_per_s", "samples_per_s", "grad_norm", "power_w_per_rank", "tflops_per_rank")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart."""

    name: str
    values: pd.Series
    """Values by iteration; where one is not finite, the line is broken."""
    kind: str = ""
    """`dots` without a line; `faint` for a prediction, `before` for an earlier run; nothing else."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Quantities of one unit."""

    key: str
    """A key of metrics.jsonl, or what else names it."""
    title: str
    lines: Sequence[Line]
    from_zero: bool = False


def course(record: Record, figures: Statistics | None = None, prediction: Prediction | None = None) -> list[Chart]:
    """A chart for every key with a finite number: losses and the task's own metrics first, then what the engine logs.

    An evaluation's value, such as `valid_loss`, is in the chart of the key that it is named after. Iteration times also
    have the time between an iteration's events and the prediction.
    """
    known = {str(name): line for name in record.metrics if (line := _logged(record, str(name))) is not None}
    charts = []
    for key in _ordered(known):
        lines = [known[key]]
        if key == "loss":
            lines += _upstream(record)
        if (evaluated := known.get(f"{EVALUATED}{key}")) is not None:
            lines = [replace(lines[0], name="training"), replace(evaluated, name="evaluation"), *lines[1:]]
        if key == "elapsed_ms":
            lines = [replace(lines[0], name="mean between log lines"), *_times(record, figures, prediction)]
        title = TITLES.get(key, key or '""')
        if key == "unix":
            lines, title = _clock(lines[0], title)
        charts.append(Chart(key=key, title=title, lines=lines, from_zero=key in FROM_ZERO))
    if memory := _memory(record):
        charts.append(Chart(key="memory", title="Memory of a rank, GiB", lines=memory, from_zero=True))
    return charts


def beside(charts: Sequence[Chart], before: Record) -> list[Chart]:
    """The charts with what an earlier run had logged of the same keys, but of its clock."""
    others = {chart.key: chart.lines[0] for chart in course(before) if chart.key not in ("unix", "memory")}
    found = []
    for chart in charts:
        lines = [*chart.lines]
        if chart.key in others:
            lines[0] = replace(lines[0], name="this run") if len(lines) == 1 else lines[0]
            lines.append(Line(name="run before", values=others[chart.key].values, kind="before"))
        found.append(replace(chart, lines=lines))
    return found


def _logged(record: Record, key: str) -> Line | None:
    """None without a finite number, and of the iterations themselves.

    A key of half of the lines or more is a course with gaps; of fewer it has values here and there, which are joined.
    """
    if key == ITERATION:
        return None
    values = record.metrics.set_index(ITERATION)[key].astype("float64")
    finite = values[np.isfinite(values)]
    if finite.empty:
        return None
    return Line(name=key, values=values if 2 * len(finite) >= len(values) else values[finite.index])


def _clock(line: Line, title: str) -> tuple[list[Line], str]:
    """Since the first log line, in the unit that fits."""
    since = line.values - line.values[np.isfinite(line.values)].iloc[0]
    longest = since[np.isfinite(since)].max()
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (60, "min")) if longest < 120 * size), (3600, "hours"))
    return [replace(line, values=since / size)], f"{title}, {unit}"


def _ordered(known: dict[str, Line]) -> Iterator[str]:
    """The keys that have a chart, in the order of the charts."""
    beside = {f"{EVALUATED}{key}" for key in known}
    keys = [key for key in known if key not in beside]
    evaluated = [key for key in keys if key.startswith(EVALUATED)]
    own = [key for key in keys if key not in TITLES and key not in evaluated]
    return (key for key in ("loss", *evaluated, *own, *LATE, *LAST) if key in keys)


def _upstream(record: Record) -> Iterator[Line]:
    """Losses on other data, in a log of Megatron-LM."""
    every = record.upstream.evaluations if record.upstream else ()
    for data in ("validation", "test"):
        found = {one.iteration: one.loss for one in every if one.data == data}
        if found:
            yield Line(name=data, values=pd.Series(found, dtype="float64"))


def _times(record: Record, figures: Statistics | None, prediction: Prediction | None) -> Iterator[Line]:
    if figures is not None and len(figures.iterations):
        seen = pd.Series(figures.length_ns / 1e6, figures.iterations)
        yield Line(name="first to last event", values=seen, kind="dots")
    if prediction is not None and len(record.metrics):
        ends = sorted({int(record.metrics[ITERATION].iloc[at]) for at in (0, -1)})
        yield Line(name="predicted", values=pd.Series(prediction.iteration_s * 1e3, ends), kind="faint")


def _memory(record: Record) -> list[Line]:
    """Returns for each stage the most that one of its ranks took, GiB; only the fullest of many stages; nothing for a
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
    return [Line(name=f"stage {stage}", values=most[stage]) for stage in sorted(fullest)]


def axes(record: Record) -> dict[str, pd.Series]:
    """Returns what had been spent up to each iteration: samples, epochs, tokens, hours of iterations and evaluations,
    dollars; what is not known, or does not only grow, is left out."""
    if not len(record.metrics):
        return {}
    known = spent(record).set_axis(pd.Index(record.metrics[ITERATION].astype("int64")), axis=0)
    if (tokens := _tokens(record)) is not None:
        known[TOKENS] = tokens
    found = {}
    for name in (SAMPLES, EPOCHS, TOKENS, HOURS, DOLLARS):
        if name in known:
            values = known[name][np.isfinite(known[name])]
            if len(values) and values.is_monotonic_increasing and values.iloc[0] >= 0:
                found[name] = values
    return found


def _tokens(record: Record) -> pd.Series | None:
    """That the model took: of samples of one length, their number times the length; of sentences, which vary, what the
    lines say of tokens a second."""
    metrics = record.metrics.set_index(ITERATION)
    if "tokens_per_s" not in metrics or not {"consumed_samples", "elapsed_ms"} <= set(metrics):
        return None
    model = record.plan.model
    if not model.traits.translates and model.tokens:
        return metrics["consumed_samples"].astype("float64") * model.tokens
    hours = spent(record)[HOURS].to_numpy()
    evaluated = metrics["evaluation_s"].astype("float64").fillna(0) / 3600 if "evaluation_s" in metrics else 0.0
    trained = pd.Series(np.diff(hours, prepend=0.0), metrics.index) - evaluated
    return (metrics["tokens_per_s"].astype("float64") * trained * 3600).cumsum()
