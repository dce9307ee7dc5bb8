"""Memory of every stage: what it took at most, what was predicted of it, and what its GPUs have."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fasop.costs.memory import GIB
from fasop.simulation.predict import Prediction, Stage
from reports.figures.page import table
from reports.readers.record import Record
from reports.sections.stages_section import peak_mib

PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
LEFT, WIDTH, ROW = 70, 560, 30
NOTE = (
    "Measured: the most that torch's allocator had given out on a GPU of the stage. Predicted: on top of that 1 GiB "
    "for the CUDA context and the buffers of NCCL, which the allocator does not see. The limit is the memory of the "
    "stage's smallest GPU."
)


def memory_section(record: Record, prediction: Prediction) -> str:
    """The section of a run's page, as HTML; nothing for a run on CPUs, whose limit is the machine's."""
    if record.plan.device == "cpu" and record.plan.rehearsal is None:
        return ""
    measured = [peak_mib(record, stage, "max_allocated") for stage in range(record.plan.pipeline)]
    return (
        f"<section><h2>Memory</h2><p>{escape(_answer(prediction, measured))}</p>{memory_parts(prediction, measured)}"
        f'<p class="note">{escape(NOTE)}</p></section>'
    )


def memory_parts(prediction: Prediction, measured: Sequence[float | None] = ()) -> str:
    """A chart and a table of what each stage holds, as HTML.

    Args:
        measured: by stage, MiB; None where it is not known, empty where nothing is.
    """
    peaks = measured if any(seen is not None for seen in measured) else [None] * len(prediction.stages)
    known = any(seen is not None for seen in peaks)
    rows = []
    for number, (stage, seen) in enumerate(zip(prediction.stages, peaks, strict=True)):
        free = stage.limit_gib - (stage.memory_gib if seen is None else seen / 1024)
        told = [f"{_gib(stage, part):.2f}" for part in PARTS] + [f"{stage.memory_gib:.2f}"]
        told += ["–" if seen is None else f"{seen / 1024:.2f}"] if known else []
        rows.append((str(number), *told, f"{stage.limit_gib:.2f}", f"{free:.2f}"))
    head = ("stage", *PARTS, "predicted GiB", *(["measured GiB"] if known else []), "limit GiB", "left GiB")
    return _chart(prediction, peaks) + table(head, rows, numeric=True)


def _gib(stage: Stage, part: str) -> float:
    return stage.memory.by_term()[part].of(sum(stage.layers)) / GIB


def _answer(prediction: Prediction, measured: Sequence[float | None]) -> str:
    """How near the fullest stage is to its limit."""
    seen = [(mib / 1024, number) for number, mib in enumerate(measured) if mib is not None]
    used = seen or [(stage.memory_gib, number) for number, stage in enumerate(prediction.stages)]
    share, gib, number = max((gib / prediction.stages[number].limit_gib, gib, number) for gib, number in used)
    limit, verb = prediction.stages[number].limit_gib, "took" if seen else "is predicted to take"
    return f"Stage {number} is the fullest: it {verb} {gib:.1f} of {limit:.1f} GiB, {share:.0%}."


def _chart(prediction: Prediction, measured: Sequence[float | None]) -> str:
    """A bar for each stage: the predicted parts, a line at the limit, a dot at the measured peak."""
    most = max(max(stage.limit_gib, stage.memory_gib) for stage in prediction.stages)
    height = ROW * len(prediction.stages) + 6

    def across(gib: float) -> float:
        return LEFT + gib / most * (WIDTH - LEFT - 12)

    marks = []
    for number, (stage, seen) in enumerate(zip(prediction.stages, measured, strict=True)):
        top, at = ROW * number + 6, 0.0
        marks.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">stage {number}</text>')
        for index, part in enumerate(PARTS, 1):
            gib = _gib(stage, part)
            tip = f"<title>stage {number}, predicted {part}: {gib:.2f} GiB</title>"
            size = f'x="{across(at):.1f}" width="{across(gib) - LEFT:.1f}" y="{top}" height="20"'
            marks.append(f'<rect class="part{index}" {size}>{tip}</rect>')
            at += gib
        limit = across(stage.limit_gib)
        tip = f"<title>stage {number}, limit: {stage.limit_gib:.2f} GiB</title>"
        marks.append(
            f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top - 3}" y2="{top + 23}">{tip}</line>'
        )
        if seen is not None:
            tip = f"<title>stage {number}, measured at most: {seen / 1024:.2f} GiB</title>"
            marks.append(f'<circle class="peak" cx="{across(seen / 1024):.1f}" cy="{top + 10}" r="5">{tip}</circle>')
    keys = "".join(f'<span class="key part{index}">{part}</span>' for index, part in enumerate(PARTS, 1))
    keys += '<span class="key limit">limit</span>'
    keys += '<span class="key peak">measured</span>' if any(seen is not None for seen in measured) else ""
    return (
        f'<figure class="chart memory"><figcaption>GiB{keys}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Memory of every stage, its predicted parts, its '
        f'limit">{"".join(marks)}</svg></figure>'
    )
