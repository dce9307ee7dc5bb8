"""The table of a run's stages: layers, where the time goes, the bubble and the ideal to compare it with, memory."""

from __future__ import annotations

from html import escape

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from conf.visible import plural
from fasop.simulation.predict import Prediction
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.schedules import SCHEDULES, Bubble
from reports.facts.frames import (
    ALLOWANCE,
    MEANING,
    MEMORY,
    PEAKS,
    TITLES,
    memory_frame,
    peak_kind,
    stages_frame,
    stragglers_frame,
)
from reports.facts.statistics import SLOW_RANK, Statistics, ideal_bubble
from reports.figures.chart import rows_height
from reports.figures.embed import BORDER, RAISED, SERIES, SOFT, TEXT, embedded, figure
from reports.figures.page import Names, number, table, table_behind
from reports.readers.record import Record

NO_FLUSH = "This schedule has no flush: the bubble also includes the time in which a rank records nothing."
BUBBLE = "Bubble %: bubble / (passes + bubble). Passes include their communication, as in the formulas for schedules."


def stages_section(
    record: Record, figures: Statistics, prediction: Prediction | None = None, uncertainty_ns: int | None = 0
) -> str:
    """The section of a run's page on its stages, as HTML. `uncertainty_ns`: how well the clocks of the ranks agree;
    None where it is not known."""
    plan, frame, timed = record.plan, stages_frame(record, figures, prediction), figures.steady.any()
    kind = peak_kind(record)
    shown = [key for key in TITLES if key != "tensor" or plan.tensor > 1]
    columns = [(TITLES[key], key, 1.0, ".1f") for key in shown] + [("bubble %", "bubble_share", 100.0, ".1f")]
    columns += [("predicted %", "predicted_bubble_share", 100.0, ".1f")] if prediction is not None else []
    columns = [one for one in columns if (frame[one[1]].abs() >= 0.05 / one[2]).any()] if timed else []
    columns += [("peak memory MiB", "peak_mib", 1.0, ".0f")] if kind else []
    head = ["stage", plan.model.counted_name(), *(title for title, *_ in columns)]
    rows = [
        [str(stage), row["layers"], *(number(scale * row[key], f",{form}") for _, key, scale, form in columns)]
        for stage, row in frame.iterrows()
    ]
    notes = (
        [_note(plan, figures), _clocks(uncertainty_ns)]
        if timed
        else ["The events have no steady iteration, so there are no times."]
    )
    if kind:
        notes.append(f"Peak memory: {PEAKS[kind]}, on the stage's fullest rank.")
    message = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    if timed:
        meaning = escape(" ".join([MEANING, BUBBLE, *([NO_FLUSH] if plan.stream else [])]))
        message += f'<details><summary>What the columns mean</summary><p class="note">{meaning}</p></details>'
    return f"<section><h2>Stages</h2>{table(head, rows, kind='numeric')}{message}</section>"


def ideal(plan: Plan) -> Bubble | None:
    """What to compare the bubble of a run with; None for a schedule of which it is not known."""
    if plan.schedule_file or plan.shares or plan.replicas or plan.adapt:
        return None
    if not plan.ranks or not plan.micro_batches[0]:  # a log need not tell
        return None
    return ideal_bubble(plan.schedule, plan.pipeline, plan.chunks, plan.micro_batches[0])


def _clocks(uncertainty_ns: int | None) -> str:
    if uncertainty_ns is None:
        return "The nodes' clock offset is unknown."
    if not uncertainty_ns:
        return "All ranks are on one clock."
    return f"The ranks' clocks agree within {uncertainty_ns / 1e3:,.0f} µs; smaller differences mean nothing."


def _note(plan: Plan, figures: Statistics) -> str:
    note = (
        "Milliseconds per iteration; medians over the ranks of a stage and "
        f"{plural(int(figures.steady.sum()), 'steady iteration')} (complete, and not the first). They add up to "
        f"{figures.usual_period_ms:,.1f} ms, the median by events, which do not cover the time between iterations."
    )
    known = ideal(plan)
    if known is None:
        return note
    equal = (
        "forward, input-gradient and weight-gradient passes" if SCHEDULES[plan.schedule].splits_backward else "stages"
    )
    return (
        f"{note} With equal {equal} and communication that takes no time, {known.schedule} has {known.formula} = "
        f"{known.idle}/{known.length} = {known.fraction:.1%}."
    )


SLOW_ITERATION = 1.5
"""Times the median length, where the batch changes per sample, from which an iteration is named."""
MOST = 10


def stragglers_section(figures: Statistics, plan: Plan) -> str:
    """The section of a run's page, as HTML; nothing without a steady iteration."""
    if not figures.steady.any():
        return ""
    found = stragglers_frame(figures, plan)
    longer = f"over {SLOW_RANK - 1:.0%} longer than the others of {'their' if len(found) > 1 else 'its'} stage"
    if plan.data * plan.tensor == 1:
        message = "Every stage has one rank, so there is no peer to compare with."
    elif len(found):
        message = f"{plural(len(found), 'rank')} of {len(plan.ranks)} computed {longer}."
    else:
        message = f"No rank computed {longer}."
    rows = [
        (
            str(one.rank),
            Names([one.node]),
            str(one.stage),
            f"{one.compute_ms:,.1f}",
            f"{one.others_ms:,.1f}",
            f"{one.more:+.1%}",
        )
        for one in found.head(MOST).itertuples()
    ]
    ranks = table(("rank", "node", "stage", "compute ms", "others ms", "more"), rows) if rows else ""
    return f"<section><h2>Stragglers</h2><p>{escape(message)}</p>{ranks}<p>{escape(_iterations(figures))}</p></section>"


def _iterations(figures: Statistics) -> str:
    samples = figures.samples[figures.steady]
    lengths = figures.length_ns[figures.steady] / samples
    median = "the median" if (figures.samples == 1).all() else "the median per sample"
    # A small batch takes longer per sample because of what every iteration takes, so it must be slow for its size, too.
    usual = np.full(len(lengths), np.median(lengths))
    for batch in set(samples.tolist()):
        of_batch = samples == batch
        usual[of_batch] = np.maximum(usual[of_batch], np.median(lengths[of_batch]))
    slow = [int(number) for number in figures.iterations[figures.steady][lengths > SLOW_ITERATION * usual]]
    if not slow:
        return f"No iteration after the first took over {SLOW_ITERATION:g} times {median}."
    named = ", ".join(map(str, slow[:MOST])) + (f" and {len(slow) - MOST:,} more" if len(slow) > MOST else "")
    return f"{plural(len(slow), 'iteration')} took over {SLOW_ITERATION:g} times {median}: {named}."


MEMORY_NOTE = (
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
        f"<section><h2>Memory</h2><p>{escape(_fullest(memory))}</p>{memory_parts(memory)}"
        f'<p class="note">{escape(MEMORY_NOTE)}</p></section>'
    )


def memory_parts(memory: pd.DataFrame) -> str:
    """A chart and a table of what each stage holds (`reports.facts.frames.memory_frame`), as HTML."""
    measured = ["measured"] if memory["measured"].notna().any() else []
    columns = [*MEMORY, "predicted", *measured, "limit", "left"]
    head = ("stage", *MEMORY, *(f"{name} GiB" for name in columns[len(MEMORY) :]))
    rows = [(str(stage), *(number(row[name], ".2f") for name in columns)) for stage, row in memory.iterrows()]
    drawn = embedded(stage_memory(memory), "Memory of every stage: predicted parts and limit")
    return drawn + table_behind(head, rows, f"Memory of all {len(rows)} stages", kind="numeric")


def _fullest(memory: pd.DataFrame) -> str:
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
