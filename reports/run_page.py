"""The page of one run: the answer first, then the plan, the course, the stages, and how to reproduce it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from datetime import UTC, datetime
from html import escape
from statistics import median
from typing import Any

from reports.chart import Series, lines
from reports.events import Timeline
from reports.page import bullets, emulated, missing, page, table
from reports.plan_section import plan_section
from reports.record import Plan, Record
from reports.stages_section import ideal, stages_section
from reports.statistics import Statistics
from reports.upstream_log import UpstreamLog
from reports.verdict import Verdict

MEMORY = ("rank", "stage", "allocated MiB", "max allocated MiB", "reserved MiB", "max reserved MiB")


def render(record: Record, timeline: Timeline, figures: Statistics, verdict: Verdict | None = None) -> str:
    """The page `index.html` of a run, as HTML."""
    notes = [*record.notes, *timeline.notes]
    if record.plan.timeline and not figures.steady.any():
        notes.append("no complete iteration after the first in the events yet: no bubble and no times per stage")
    body = "\n".join(
        [
            emulated(record.plan.rehearsal),
            f'<header><p class="crumbs">tdpp run</p><h1>{escape(record.name)}</h1>'
            '<nav><a href="timeline.html">Timeline of all ranks →</a></nav></header>',
            "<main>",
            _verdict(verdict),
            _failures(record),
            _figures(record, figures),
            missing(notes),
            plan_section(record.plan),
            f'<section><h2>Course</h2><div class="charts">{_charts(record, figures)}</div></section>',
            stages_section(record, figures) if record.upstream is None else _upstream(record.upstream, record.plan),
            f"<section><h2>Reproduce</h2>{_reproduce(record)}</section>",
            f"<section><h2>Configuration</h2>{_configuration(record)}</section>",
            "</main>",
        ]
    )
    return page(f"{record.name} – tdpp", body)


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    tone = "good" if verdict.state == "succeeded" else "bad" if verdict.exit_code else "open"
    return (
        f'<section class="verdict {tone}"><h2>{escape(verdict.state)}</h2>'
        f'<p class="reason">{escape(verdict.reason)}</p>{bullets(verdict.evidence)}'
        f'<p class="rule">rule {escape(verdict.rule)} · exit code {verdict.exit_code}</p></section>'
    )


def _failures(record: Record) -> str:
    if not record.failures:
        return ""
    rows = [
        (str(one.rank), one.node, "follows from another" if one.symptom else "cause", one.type, one.message)
        for one in record.failures
    ]
    return f"<section><h2>Failed ranks</h2>{table(('rank', 'node', 'kind', 'error', 'message'), rows)}</section>"


def _figures(record: Record, figures: Statistics) -> str:
    """The few numbers that sum up the run."""
    plan, last = record.plan, record.metrics[-1] if record.metrics else {}
    reached = int(last["iteration"]) if last else 0
    upto = f"mean up to iteration {reached}" if last else ""
    known = ideal(plan)
    beside = f" · ideal {known.schedule}: {known.fraction:.1%}" if known else ""
    after = "median of the log lines after the first" if len(record.metrics) > 1 else "mean since the start"
    after += " · emulated" if plan.rehearsal else ""
    tflops = _settled(record, "tflops_per_rank")
    cards = [
        ("Iteration", f"{reached} of {plan.iterations}", "last logged"),
        *([] if plan.rehearsal else [("Loss", _number(last.get("loss"), ".4f"), upto)]),
        ("Iteration time", _number(_settled(record, "elapsed_ms"), ",.1f", " ms"), after),
        ("Tokens per second", _number(_settled(record, "tokens_per_s"), ",.0f"), after),
        *(
            []
            if tflops is None
            else [("Model TFLOP/s per rank", f"{tflops:{',.1f' if tflops >= 1 else '.2g'}}", after)]
        ),
        ("Bubble", _number(figures.bubble, ".1%"), f"mean over ranks{beside}"),
    ]
    items = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="note">{escape(note)}</dd></div>'
        for name, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _settled(record: Record, key: str) -> float | None:
    """Median over the log lines; the first one, which has the start-up in it, only when it is alone."""
    values = [float(line[key]) for line in record.metrics if key in line]
    return median(values[1:] or values) if values else None


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"


def _charts(record: Record, figures: Statistics) -> str:
    at = [float(line["iteration"]) for line in record.metrics]
    loss = Series("loss", at, [_finite(line, "loss") for line in record.metrics])
    logged = Series("mean between log lines", at, [_finite(line, "elapsed_ms") for line in record.metrics])
    seen = Series("first to last event", figures.iterations.tolist(), (figures.length_ns / 1e6).tolist(), line=False)
    time = [logged, seen] if len(figures.iterations) else [logged]
    course = lines([loss], x_title="iteration", y_title="Loss", label="Loss over iterations")
    return ("" if record.plan.rehearsal else course) + lines(
        time,
        x_title="iteration",
        y_title="Iteration time, ms",
        label="Iteration time in milliseconds over iterations",
        from_zero=True,
    )


def _finite(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if value is not None else math.nan


def _upstream(log: UpstreamLog, plan: Plan) -> str:
    """Megatron-LM's own times and memory, in the place of the stages' times."""
    times = [(name, f"{least:,.2f}", f"{largest:,.2f}") for name, (least, largest) in log.timers.items()]
    memory = [
        (str(rank), str(plan.ranks[rank].stage), *(f"{mib:,.1f}" for mib in astuple(told)))
        for rank, told in log.memory.items()
    ]
    return (
        "<section><h2>Times across ranks</h2>"
        + (table(("timer", "least ms", "largest ms"), times, numeric=True) if times else _none("no timers"))
        + '<p class="note">Megatron-LM&apos;s timers; medians of the log lines after the first.</p></section>'
        + "<section><h2>Memory</h2>"
        + (table(MEMORY, memory, numeric=True) if memory else _none("no memory figures"))
        + "</section>"
    )


def _none(what: str) -> str:
    return f'<p class="none">{what} in the logs</p>'


def _reproduce(record: Record) -> str:
    provenance = record.provenance
    rows = list(_flat(provenance))
    steps = []
    if provenance.get("commit"):
        steps.append(shlex.join(["git", "checkout", str(provenance["commit"])]))
        changed = [str(line) for line in provenance.get("changed") or ()]
        if any(line[:2] != "??" for line in changed):
            steps.append(shlex.join(["git", "apply", str(record.diff)]))
        steps += [f"# not in the patch, for git did not track it: {line[3:]}" for line in changed if line[:2] == "??"]
    steps.append(shlex.join(["tdpp", "launch", *record.overrides]))
    known = table(("what", "value"), rows) if rows else '<p class="none">no provenance is known</p>'
    return f'<pre class="command">{escape(chr(10).join(steps))}</pre>{known}'


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested mappings: dotted key and text."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        yield key, ", ".join(map(str, value))
    elif key == "unix":
        yield "time", datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _configuration(record: Record) -> str:
    overrides = bullets(record.overrides) if record.overrides else '<p class="none">no overrides: the defaults</p>'
    return (
        f"<h3>Overrides as submitted</h3>{overrides}"
        f"<details><summary>config.yaml as submitted</summary><pre>{escape(record.config)}</pre></details>"
    )
