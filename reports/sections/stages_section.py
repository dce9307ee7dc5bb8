"""The table of a run's stages: layers, where the time goes, the bubble and the ideal to compare it with, memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fasop.simulation.predict import Prediction
from reports.facts.statistics import IdealBubble, Statistics, ideal_bubble
from reports.facts.terms import MEANING, TITLES, Terms, measured, ranks_seen
from reports.figures.page import table
from reports.readers.record import Plan, Record
from reports.sections.plan_section import layers, plural

BUBBLE = (
    "As a fraction, the bubble is bubble / (passes + bubble), with the passes whole: as in the formulas for schedules, "
    "which know of passes and waits alone."
)
PEAKS = {
    "max_allocated": "the most that torch's allocator had given out on the GPU (max_allocated)",
    "max_resident": "the most that the process had resident in the CPU's memory (max_resident)",
}
"""Kinds of memory that tell a rank's peak; a rank has one of them."""


def stages_section(
    record: Record, figures: Statistics, prediction: Prediction | None = None, uncertainty_ns: int | None = 0
) -> str:
    """The section of a run's page on its stages, as HTML.

    Args:
        uncertainty_ns: how well the clocks of the ranks agree; None where it is not known.
    """
    plan = record.plan
    period_ms = figures.usual_period_ms
    times = {} if period_ms is None else measured(figures, plan, period_ms)
    kind = next((kind for kind in PEAKS if any(kind in mib for mib in record.memory.values())), None)
    shown = [key for key in TITLES if key != "tensor" or plan.tensor > 1]
    columns = [*(TITLES[key] for key in shown), "bubble %", *([] if prediction is None else ["predicted %"])]
    head = ["stage", "layers"] + (columns if times else []) + (["peak memory MiB"] if kind else [])
    rows = []
    for stage in range(plan.pipeline):
        row = [str(stage), layers(plan, stage)]
        if times:
            row += _times(times[stage], shown) if stage in times else ["–"] * len(shown)
            row.append(_percent(figures.bubble_of(ranks_seen(figures, plan, stage))) if stage in times else "–")
            if prediction is not None:
                row.append(_percent(Terms.of_prediction(prediction.stages[stage].terms).bubble_share))
        if kind:
            peak = peak_mib(record, stage, kind)
            row.append("–" if peak is None else f"{peak:,.0f}")
        rows.append(row)
    notes = (
        [_note(plan, figures), _clocks(uncertainty_ns)] if times else ["No steady iteration in the events: no times."]
    )
    if kind:
        notes.append(f"Peak memory: of the stage's ranks the largest; {PEAKS[kind]}.")
    said = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return f"<section><h2>Stages</h2>{table(head, rows, numeric=True)}{said}</section>"


def ideal(plan: Plan) -> IdealBubble | None:
    """What to compare the bubble of a run with; None for a schedule of which it is not known."""
    if plan.schedule_file or not plan.ranks or not plan.micro_batches:  # a log need not tell
        return None
    return ideal_bubble(plan.schedule, plan.pipeline, plan.chunks, plan.micro_batches)


def _times(terms: Terms, shown: Sequence[str]) -> list[str]:
    return [f"{getattr(terms, key):,.1f}" for key in shown]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def peak_mib(record: Record, stage: int, kind: str) -> float | None:
    """Of the stage's ranks the largest, of a kind of memory (docs/formats.md, memory); None if no rank told."""
    ranks = [rank.rank for rank in record.plan.ranks if rank.stage == stage]
    told = [record.memory[rank][kind] for rank in ranks if kind in record.memory.get(rank, {})]
    return max(told) if told else None


def _clocks(uncertainty_ns: int | None) -> str:
    if uncertainty_ns is None:
        return "It is not known how well the clocks of the nodes agree."
    if not uncertainty_ns:
        return "All ranks are on one clock."
    return f"The clocks of the ranks agree within {uncertainty_ns / 1e3:,.0f} µs; no comparison of ranks is finer."


def _note(plan: Plan, figures: Statistics) -> str:
    note = (
        "Milliseconds of an iteration; medians over the ranks of a stage and "
        f"{plural(int(figures.steady.sum()), 'steady iteration')} (complete, and not the first). {MEANING} "
        f"{BUBBLE}"
    )
    known = ideal(plan)
    if known is None:
        return note
    equal = "forward, input-gradient and weight-gradient passes" if plan.schedule == "zb_h1" else "stages"
    return (
        f"{note} With equal {equal} and free communication {known.schedule} has {known.formula} = "
        f"{known.idle}/{known.length} = {known.fraction:.1%}."
    )
