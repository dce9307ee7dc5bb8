"""Predicted against measured: where the difference comes from, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fasop.costs.layers import Basis
from fasop.simulation.predict import Prediction
from reports.facts.frames import TITLES, Terms
from reports.figures.page import Cell, Row, number, table_behind, than

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
