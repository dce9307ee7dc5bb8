"""Memory of every stage: what it took at most, what was predicted of it, and what its GPUs have."""

from __future__ import annotations

from html import escape

import pandas as pd
from plotly import graph_objects as go

from fasop.simulation.predict import Prediction
from reports.facts.frames import ALLOWANCE, MEMORY, memory_frame
from reports.figures.chart import rows_height
from reports.figures.embed import BORDER, RAISED, SERIES, SOFT, TEXT, embedded, figure
from reports.figures.page import number, table_behind
from reports.readers.record import Record

NOTE = (
    "Measured: the peak of torch's allocator on a GPU of the stage. Predicted besides, as the allowance: fragments, "
    "which the allocator holds unused, NCCL's communicators, and the CUDA context. The limit is the memory of the "
    "stage's smallest GPU."
)


def memory_section(record: Record, prediction: Prediction) -> str:
    """The section of a run's page, as HTML; nothing for a run on CPUs, whose limit is the machine's."""
    if record.plan.device == "cpu" and record.plan.rehearsal is None:
        return ""
    memory = memory_frame(record, prediction)
    return (
        f"<section><h2>Memory</h2><p>{escape(_answer(memory))}</p>{memory_parts(memory)}"
        f'<p class="note">{escape(NOTE)}</p></section>'
    )


def memory_parts(memory: pd.DataFrame) -> str:
    """A chart and a table of what each stage holds (`reports.facts.frames.memory_frame`), as HTML."""
    measured = ["measured"] if memory["measured"].notna().any() else []
    columns = [*MEMORY, "predicted", *measured, "limit", "left"]
    head = ("stage", *MEMORY, *(f"{name} GiB" for name in columns[len(MEMORY) :]))
    rows = [(str(stage), *(number(row[name], ".2f") for name in columns)) for stage, row in memory.iterrows()]
    drawn = embedded(stage_memory(memory), "Memory of every stage: predicted parts and limit")
    return drawn + table_behind(head, rows, f"Memory of all {len(rows)} stages", kind="numeric")


def _answer(memory: pd.DataFrame) -> str:
    """How near the fullest stage is to its limit."""
    seen = memory["measured"].notna().any()
    used = memory["measured" if seen else "predicted"]
    stage = (used / memory["limit"])[::-1].idxmax()
    gib, limit, verb = used[stage], memory["limit"][stage], "took" if seen else "is predicted to take"
    return f"Stage {stage} is the fullest: it {verb} {gib:.1f} of {limit:.1f} GiB, {gib / limit:.0%}."


def stage_memory(memory: pd.DataFrame) -> go.Figure:
    """A bar for each stage: the predicted parts, a line at the limit, a dot at the measured peak."""
    stages = [f"stage {number}" for number in memory.index]
    made = figure(
        height=120 + rows_height(len(stages)),
        barmode="stack",
        legend={"traceorder": "normal"},
        margin={"l": 20, "r": 12, "t": 64, "b": 40},  # room for a legend of three lines, as on a phone
    )
    made.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6)
    made.update_xaxes(title_text="GiB", rangemode="tozero")
    parts = {part: memory[part] for part in MEMORY if part not in ALLOWANCE}
    parts["allowance"] = memory[[*ALLOWANCE]].sum(axis=1)
    colours = (SERIES[0], SERIES[2], SERIES[3], SERIES[1], SOFT, BORDER)
    for (part, gib), colour in zip(parts.items(), colours, strict=True):
        made.add_bar(
            name=part,
            y=stages,
            x=gib.tolist(),
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"%{{y}}, predicted {part}: %{{x:.2f}} GiB<extra></extra>",
        )
    limit = {"symbol": "line-ns-open", "size": 22, "line": {"width": 2.5}, "color": TEXT}
    peak = {"size": 10, "color": RAISED, "line": {"width": 2, "color": TEXT}}
    marks = [("limit", "limit", limit)]
    marks += [("measured", "measured peak", peak)] if memory["measured"].notna().any() else []
    for name, message, marker in marks:
        tip = f"%{{y}}, {message}: %{{x:.2f}} GiB<extra></extra>"
        made.add_scatter(name=name, y=stages, x=memory[name].tolist(), mode="markers", marker=marker, hovertemplate=tip)
    return made
