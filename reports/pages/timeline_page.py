"""The page with the events of all ranks; `static/` has the scripts that draw them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from conf.run_folder.judgement import Culprit, Findings
from conf.visible import numbered, plural
from fasop.simulation.predict import Prediction
from reports.facts.breakdown import messages
from reports.facts.frames import measured
from reports.facts.representatives import alike, slowest_first
from reports.facts.statistics import Statistics, time_of
from reports.figures.embed import TIMELINE, looks
from reports.figures.pack import event_columns, pack, path_columns, predicted_columns
from reports.figures.page import data, emulated, missing, page, static
from reports.path.why import Why
from reports.readers.events import Timeline, legend_order
from reports.readers.record import Record, rank_label
from reports.sections.cause_section import cause_in_words
from reports.sections.stages_section import ideal

SHOWING = ("shown.js", "tips.js", "totals.js", "find.js")
OWN = ("overview.js", "path.js", "ended.js", "rows.js", *SHOWING, "address.js", "timeline.js")
SCRIPTS = ("scheme.js", *TIMELINE, *OWN)
FOLDED_FROM = 32
"""Ranks, from which the page opens with the slowest replica, and one rank of each kind that differs from it."""


def render(
    record: Record,
    timeline: Timeline,
    figures: Statistics,
    prediction: Prediction | None = None,
    why: Why | None = None,
    findings: Findings | None = None,
) -> str:
    """The page `timeline.html` of a run, as HTML. That of a run that failed or stands still opens with its end."""
    header = (
        f'{emulated(record.plan.rehearsal)}<header><p class="crumbs">{record.kind}</p>'
        f"<h1>{escape(record.name)} <small>timeline</small></h1>"
        '<nav><a href="index.html">← Summary of the run</a></nav></header>'
    )
    title = f"Timeline of {record.name} – tdpp"
    notes = missing([*record.notes, *timeline.notes])
    if not len(timeline.events):
        reason = _why_no_events(record, findings)
        return page(title, f'{header}<main>{notes}<p class="none">No events: {reason}.</p></main>')
    foreseen = prediction.events if prediction else ()
    names = (*timeline.names, *legend_order({one.kind for one in foreseen} - set(timeline.names)))
    packed = pack(
        {
            **event_columns(timeline.events, len(record.plan.ranks), figures.waiting_ns),
            **iteration_columns(figures),
            **predicted_columns([prediction] if prediction else [], names),
            **(path_columns(why.path, timeline.events) if why else {}),
        }
    )
    facts = {"layout": packed.layout, "names": names, "predicted_ns": prediction.iteration_s * 1e9 if prediction else 0}
    path_at = None if why is None else int(np.flatnonzero(figures.iterations == why.iteration)[0])
    culprit = findings.culprit if findings else None
    answer = _answer(record, figures, why)
    if findings and culprit:
        answer = _end(findings.verdict.state, culprit, figures, _answer(record, figures, None))
    body = "\n".join(
        [
            header,
            f'<main class="wide"><p class="answer">{escape(answer)}</p>',
            static("timeline.html"),
            notes,
            "</main>",
            looks(),
            data("run", facts | _facts(record, timeline, figures, names, culprit) | {"path": path_at}),
            f'<script type="text/plain" id="columns">{packed.text}</script>',
        ]
    )
    return page(title, body, [static(name) for name in SCRIPTS])


def _end(state: str, culprit: Culprit, figures: Statistics, usual: str) -> str:
    """How the run ended, where that is seen, and how iterations usually were."""
    who = numbered("rank", culprit.ranks) if culprit.ranks else f"node {culprit.node}"
    shown = f"Iteration {figures.iterations[-1]} is its last"
    shown += ", and the red band begins where the last event of this rank ends" if len(culprit.ranks) == 1 else ""
    shown += ", and red bands begin where the last events of these ranks end" if len(culprit.ranks) > 1 else ""
    return f"{state.capitalize()}: {who} {culprit.what.rstrip('.')}. {shown}. {usual}"


def _answer(record: Record, figures: Statistics, why: Why | None) -> str:
    """What the timeline amounts to: the time of an iteration, its bubble, and why it takes as long."""
    plan, time = record.plan, time_of(record)
    if figures.bubble is None:
        return "No iteration after the first one is complete, and the first does not count as steady."
    length_ms = float(np.median(figures.length_ns[figures.alike])) / 1e6
    period_ms = figures.usual_period_ms or length_ms
    batch = "" if figures.alike.sum() == figures.steady.sum() else " with the most frequent batch"
    steady = f"{plural(int(figures.alike.sum()), 'steady one')}{batch}"
    every = ""
    if f"{period_ms:.1f}" != f"{length_ms:.1f}":
        every = f"; iterations overlap, so one finishes every {period_ms:,.1f} ms"
    message = f"{length_ms:,.1f} ms from its first to its last event (median of {steady}){every}. "
    if time is None or time.alone:
        message = f"An iteration takes {message}"
    elif time.per_sample:
        message = f"A sample takes {time.figure} ms ({time.basis}). By events, an iteration takes {message}"
    else:
        message = f"An iteration takes {time.figure} ms ({time.basis}); by events, {message}"
    message += f"The bubble fraction is {figures.bubble:.1%}"
    known = ideal(plan)
    message += f" ({known.schedule} with equal stages: {known.fraction:.1%}); " if known else "; "
    message += f"{figures.communication:.1%} of an iteration is exposed communication."
    if why and why.gains:
        return f"{message} {cause_in_words(why)}"
    compute = {stage: terms.compute for stage, terms in measured(figures, plan, period_ms).items()}
    if len(compute) == 1:
        return message
    longest, least = max(compute, key=lambda stage: compute[stage]), min(compute, key=lambda stage: compute[stage])
    return (
        f"{message} Stage {plan.stages[longest].name} computes the longest, {compute[longest]:,.1f} ms; stage "
        f"{plan.stages[least].name} the shortest, {compute[least]:,.1f} ms."
    )


def _why_no_events(record: Record, findings: Findings | None) -> str:
    if not record.plan.timeline:
        return "the run does not record events (profile.timeline=false)"
    ended = all(state.get("state") == "ended" for state in record.node_states.values())
    ended = ended or (findings is not None and findings.over)
    return "the run ended before the first event" if ended else "none written yet"


def iteration_columns(figures: Statistics) -> dict[str, Any]:
    """Returns number, start, length and period of iterations, and shares of their ranks in 1/1000, -1 for none."""
    shares = {name: getattr(figures, name) for name in ("compute_share", "bubble_share", "communication_share")}
    origin = figures.start_ns.min()
    return {
        "iterations": figures.iterations,
        "iteration_start": figures.start_ns - origin,
        "iteration_length": figures.length_ns,
        "iteration_period": figures.period_ns,
        **{
            name: np.nan_to_num(np.rint(share * 1000), nan=-1).astype(np.int64).ravel()
            for name, share in shares.items()
        },
    }


def _facts(
    record: Record, timeline: Timeline, figures: Statistics, names: Sequence[str], culprit: Culprit | None
) -> dict[str, Any]:
    """What the scripts need to know of the ranks and where to begin."""
    number_of = {rank: number for number, stage in enumerate(record.plan.stages) for rank in stage.ranks}
    replicas = slowest_first(figures, [rank.dp for rank in record.plan.ranks])
    folded = alike(figures, record.plan.ranks, replicas) if len(record.plan.ranks) >= FOLDED_FROM else None
    return {
        "ranks": [
            {
                "label": rank_label(rank),
                "stage": number_of[rank.rank],
                "dp": rank.dp,
                "tp": rank.tp if record.plan.tensor > 1 else None,
                "node": record.plan.node_of(rank.rank),
                "host": timeline.hosts.get(rank.rank, ""),
            }
            for rank in record.plan.ranks
        ],
        "stages": [stage.name for stage in record.plan.stages],
        "chunks": record.plan.chunks,
        "streams": record.plan.stream is not None,
        "micro_batches": record.micro_batch_numbers,
        "uncertainty_ns": timeline.uncertainty_ns,
        "open": figures.middle if culprit is None else len(figures.iterations) - 1,
        "end": None if culprit is None else {"ranks": list(culprit.ranks)},
        "replicas": replicas,
        "like": folded.like.tolist() if folded else [-1] * len(record.plan.ranks),
        "alike_percent": folded.percent if folded else 0,
        "messages": [messages(name) for name in names],
    }
