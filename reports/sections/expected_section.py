"""A run beside its prediction, stage by stage, and beside the run before: is it as quick, and does it learn as well?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd

from conf.identity import identity
from conf.run_folder.iteration_time import IterationTime, Spread, within_spread
from conf.visible import plural
from fasop.costs.layers import Basis
from fasop.simulation.predict import Prediction
from reports.facts.frames import TITLES, Terms
from reports.facts.statistics import time_of
from reports.figures.page import Cell, Row, bullets, leaves, number, table, table_behind, than
from reports.readers.record import Record

COLUMNS = {"passes": "passes"} | {
    key: title for key, title in TITLES.items() if key not in ("forward", "backward", "tensor")
}
"""The terms of which a prediction tells; it has the passes whole."""
NOTE = (
    "Milliseconds per iteration: measured − predicted in bold, both values below. Measured values are medians over "
    "the ranks of a stage and the steady iterations. Passes: forward, backward and tensor group together, as in a "
    "profile. The other columns are those of the section Stages. The bubble depends on the other stages."
)
BASIS = {
    Basis.OTHER_FORMAT: "The prediction uses layer times measured in the other 16-bit format.",
    Basis.OTHER_ENGINE: "The prediction uses times of another engine's layers.",
    Basis.EXTRAPOLATED: "The prediction extrapolates beyond the measured micro-batch sizes, so it may be too long.",
    Basis.NOT_MEASURED: "No layer times were measured on these devices, so the prediction uses their peak rates, and "
    "real runs take longer. 'tdpp profile' measures layer times.",
}


@dataclass(frozen=True, kw_only=True)
class Took:
    """An iteration, as measured."""

    ms: float
    basis: str = ""
    """What to say of it where it is not the iteration time of the log."""
    terms: bool = True
    """Whether its terms by events can be compared with the prediction: they are of other batches where it changes."""


def expected_section(prediction: Prediction, measured: Mapping[int, Terms], took: Took) -> str:
    """The section of a run's page, as HTML; `measured` is by stage."""
    predicted = [Terms.of_prediction(stage.terms) for stage in prediction.stages]
    worst = _largest(measured, predicted)
    rows: list[Row] = [
        (prediction.stages[stage].name, *_row(stage, measured.get(stage), one, worst))
        for stage, one in enumerate(predicted)
    ]
    if not took.terms:
        compared = ""
    elif worst is None and all(
        stage in measured and signed(getattr(measured[stage], key) - getattr(one, key)) == "0.0"
        for stage, one in enumerate(predicted)
        for key in ("bubble", "total")
    ):
        compared = "<p>Every part of every stage, such as passes, messages and the bubble, agrees to 0.1 ms.</p>"
    else:
        head = ("stage", *COLUMNS.values(), "sum")
        compared = table_behind(head, rows, f"Differences of all {len(rows)} stages", kind="numeric compared")
        compared += f'<p class="note">{escape(NOTE)}</p>'
    basis = f'<p class="note open">{escape(BASIS[prediction.basis])}</p>' if prediction.basis in BASIS else ""
    return (
        '<section id="expected"><h2>Predicted and measured</h2>'
        f"<p>{escape(_answer(prediction, took, worst, measured, predicted))} "
        '<a href="timeline.html#predicted">Its timeline under the measured one →</a></p>'
        f"{basis}{compared}</section>"
    )


def signed(difference: float) -> str:
    """A difference with its sign, to a tenth; zero has none."""
    return "0.0" if abs(difference) < 0.05 else f"{difference:+,.1f}"


def _answer(
    prediction: Prediction,
    took: Took,
    worst: tuple[int, str] | None,
    measured: Mapping[int, Terms],
    predicted: Sequence[Terms],
) -> str:
    predicted_ms = prediction.iteration_s * 1e3
    compared = f"{than(took.ms, predicted_ms)} the predicted {predicted_ms:,.1f} ms"
    message = f"An iteration took {took.ms:,.1f} ms{took.basis}, {compared}."
    if worst is None:
        return message
    stage, key = worst
    difference = getattr(measured[stage], key) - getattr(predicted[stage], key)
    return (
        f"{message} Largest difference apart from the bubble: {COLUMNS[key]} of stage "
        f"{prediction.stages[stage].name}, {signed(difference)} ms."
    )


def _largest(measured: Mapping[int, Terms], predicted: Sequence[Terms]) -> tuple[int, str] | None:
    """Stage and term of the largest difference, if any can be seen; the bubble follows from the others."""
    differences = {
        (stage, key): abs(getattr(one, key) - getattr(predicted[stage], key))
        for stage, one in measured.items()
        for key in COLUMNS
        if key != "bubble" and signed(getattr(one, key) - getattr(predicted[stage], key)) != "0.0"
    }
    return max(differences, key=lambda place: differences[place]) if differences else None


def _row(stage: int, measured: Terms | None, predicted: Terms, worst: tuple[int, str] | None) -> Iterator[Cell]:
    for key in [*COLUMNS, "total"]:
        expected = getattr(predicted, key)
        if measured is None:
            yield Cell(f"–<small>predicted {number(expected, ',.1f')}</small>")
            continue
        seen = getattr(measured, key)
        both = f"{number(seen, ',.1f')} − {number(expected, ',.1f')}"
        mark = ' class="worst"' if worst == (stage, key) else ""
        yield Cell(f"<b>{signed(seen - expected)}</b><small>{both}</small>", mark)


NEWEST = 20
"""Log lines whose median says how quick a run is now."""
KEYS = 6
"""The most keys of a configuration that are named where two differ."""
LINES = 8
"""The most lines of the log, the newest first."""


def run_before_section(record: Record, prediction: Prediction | None, before: Record | None, link: str | None) -> str:
    """The section, as HTML; `link` is the address of the run before."""
    message = bullets(sentences(record, prediction, before))
    to = f'<p><a href="{escape(link)}">The run before →</a></p>' if link else ""
    return (
        '<section id="beside"><h2>Now, beside the prediction and the run before</h2>'
        f"{message}{to}{_newest(record, prediction, before)}</section>"
    )


def _newest(record: Record, prediction: Prediction | None, before: Record | None) -> str:
    if not len(record.metrics):
        return ""
    head = ["iteration", "ms", "against predicted", "run before ms", "loss", "run before loss"]
    rows = []
    for iteration in record.metrics["iteration"].iloc[-LINES:][::-1]:
        ms = _at(record, "elapsed_ms", iteration)
        predicted = None if prediction is None else prediction.iteration_s * 1e3
        share = None if ms is None or not predicted else ms / predicted - 1
        rows.append(
            (
                f"{iteration:,}",
                number(ms, ",.1f"),
                number(share, "+.1%") if share is not None else "",
                number(_at(before, "elapsed_ms", iteration), ",.1f") if before is not None else "",
                number(_at(record, "loss", iteration), ".4f"),
                number(_at(before, "loss", iteration), ".4f") if before is not None else "",
            )
        )
    return table(head, rows, kind="numeric")


def _at(record: Record | None, key: str, iteration: int) -> float | None:
    values = pd.Series(dtype="float64") if record is None else record.known(key)
    return float(values[iteration]) if iteration in values.index and np.isfinite(values[iteration]) else None


def sentences(record: Record, prediction: Prediction | None, before: Record | None) -> list[str]:
    """What there is to say, one thing each."""
    return [*_times(record, prediction, before), *_losses(record, before), *_configuration(record, before)]


def _times(record: Record, prediction: Prediction | None, before: Record | None) -> Iterator[str]:
    time = time_of(record)
    if time is None:
        yield "No iteration is logged yet."
        return
    newest = Spread.of(time.each_ms[-NEWEST:])
    lines = "first log line" if time.alone else f"newest {plural(newest.count, 'log line')}"
    yield f"Now: {time.text(newest.median)} ms {time.unit} {newest.doubt(time.text)}, the median of the {lines}."
    if time.alone:
        yield "The first log line has the start-up in it, so it is compared with nothing."
        return
    batch = record.plan.global_batch_size
    if prediction is None:
        yield "There is no prediction for this run."
    elif not time.per_sample or batch:
        predicted = prediction.iteration_s * 1e3 / (batch if time.per_sample else 1)
        yield f"Predicted: {time.text(predicted)} ms, so it takes {than(newest.median, predicted)} predicted."
    other = None if before is None else time_of(before)
    if before is None:
        yield "No earlier run of this name has logged iterations."
    elif other is None or other.alone or other.per_sample != time.per_sample:
        yield f"The run before, {before.name}, has no iteration times that compare."
    else:
        yield _beside(newest, time, before.name, other)


def _beside(newest: Spread, time: IterationTime, name: str, other: IterationTime) -> str:
    spread = other.spread
    message = f"The run before, {name}: {other.text(spread.median)} ms {spread.doubt(other.text)}"
    if within_spread(newest, spread):
        return f"{message}; the difference is within the spread of the iterations."
    return f"{message}, so this run takes {than(newest.median, spread.median)} the run before."


def _losses(record: Record, before: Record | None) -> Iterator[str]:
    """At the last iteration that both have logged."""
    for key, title in (("loss", "Loss"), ("valid_loss", "Evaluation's loss")):
        own, other = (one.known(key) if one is not None else None for one in (record, before))
        if own is None or other is None or before is None:
            continue
        common = own[np.isfinite(own)].index.intersection(other[np.isfinite(other)].index)
        if len(common):
            at = common.max()
            a, b = float(own[at]), float(other[at])
            yield f"{title} at iteration {at}: {a:.4f}, in the run before {b:.4f} ({a - b:+.4f})."


def _configuration(record: Record, before: Record | None) -> Iterator[str]:
    if before is None or record.experiment is None or before.experiment is None:
        return
    own, other = (dict(leaves(json.loads(identity(one)))) for one in (record.experiment, before.experiment))
    differ = [key for key in {**own, **other} if own.get(key) != other.get(key)]
    if not differ:
        yield "The run before has the same configuration."
        return
    more = f" and {len(differ) - KEYS} more keys" if len(differ) > KEYS else ""
    yield f"The configuration of the run before differs in {', '.join(differ[:KEYS])}{more}."
