"""The table of a run's stages: layers, times, bubble, memory, and the ideal to compare with."""

from __future__ import annotations

from html import escape

from fasop.predict import Prediction
from reports.page import table
from reports.plan_section import layers, plural
from reports.record import Plan, Record
from reports.statistics import IdealBubble, StageTimes, Statistics, ideal_bubble, stage_times

BUBBLE = (
    "Bubble of a rank in an iteration: 1 − busy / period. Busy is the sum of its forward-compute and "
    "backward-compute events, or of the latter's two parts, backward-input-compute and backward-weight-compute; the "
    "period is from the earliest start of the iteration's events over all ranks, or from the end of the iteration "
    "before where that is later, to their latest end. So waiting, communication that nothing hides and the optimizer "
    "all count as bubble. All-reduce is that of gradients, of layer norms' gradients and of the embedding's."
)
TIMES = ("forward ms", "backward ms", "wait to receive ms", "send ms", "all-reduce ms", "optimizer ms", "bubble")
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
    times = {row.stage: row for row in stage_times(figures, [rank.stage for rank in plan.ranks])}
    kind = next((kind for kind in PEAKS if any(kind in mib for mib in record.memory.values())), None)
    head = ["stage", "layers"] + (_columns(prediction) if times else []) + (["peak memory MiB"] if kind else [])
    rows = []
    for stage in range(plan.pipeline):
        row = [str(stage), layers(plan, stage)]
        if times:
            row += _times(times[stage]) if stage in times else ["–"] * len(TIMES)
            row += [] if prediction is None else [f"{_foreseen(prediction, stage):.1%}"]
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


def _times(row: StageTimes) -> list[str]:
    spent = (row.forward_ms, row.backward_ms, row.wait_ms, row.send_ms, row.all_reduce_ms, row.optimizer_ms)
    return [*(f"{ms:,.1f}" for ms in spent), f"{row.bubble:.1%}"]


def peak_mib(record: Record, stage: int, kind: str) -> float | None:
    """Of the stage's ranks the largest, of a kind of memory (docs/formats.md, memory); None if no rank told."""
    ranks = [rank.rank for rank in record.plan.ranks if rank.stage == stage]
    told = [record.memory[rank][kind] for rank in ranks if kind in record.memory.get(rank, {})]
    return max(told) if told else None


def _columns(prediction: Prediction | None) -> list[str]:
    return [*TIMES] if prediction is None else [*TIMES, "predicted bubble"]


def _foreseen(prediction: Prediction, stage: int) -> float:
    """The part of the predicted iteration in which a stage neither passes forward nor backward."""
    terms = prediction.stages[stage].terms
    return 1 - (terms.forward + terms.backward) / prediction.iteration_s


def _clocks(uncertainty_ns: int | None) -> str:
    if uncertainty_ns is None:
        return "It is not known how well the clocks of the nodes agree."
    if not uncertainty_ns:
        return "All ranks are on one clock."
    return f"The clocks of the ranks agree within {uncertainty_ns / 1e3:,.0f} µs; no comparison of ranks is finer."


def _note(plan: Plan, figures: Statistics) -> str:
    note = (
        "Per iteration; medians over the ranks of a stage and "
        f"{plural(int(figures.steady.sum()), 'steady iteration')} (complete, and not the first). {BUBBLE}"
    )
    known = ideal(plan)
    if known is None:
        return note
    equal = "forward, input-gradient and weight-gradient passes" if plan.schedule == "zb_h1" else "stages"
    return (
        f"{note} With equal {equal} and free communication {known.schedule} has {known.formula} = "
        f"{known.idle}/{known.length} = {known.fraction:.1%}."
    )
