"""The page of one run: the answer first, then the plan, the course, the stages, and how to reproduce it."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from datetime import UTC, datetime
from html import escape
from statistics import median
from typing import Any

from reports.chart import Series, lines
from reports.events import Timeline
from reports.page import bullets, missing, page, table
from reports.record import Plan, Record
from reports.statistics import Statistics, ideal_bubble, stage_times
from reports.upstream_log import UpstreamLog
from reports.verdict import Verdict

BUBBLE = (
    "Bubble of a rank in an iteration: 1 − busy / length. Busy is the sum of its forward-compute and "
    "backward-compute events; length is from the earliest start to the latest end of the iteration's events over all "
    "ranks. So waiting, communication that nothing hides and the optimizer all count as bubble."
)

MEMORY = ("rank", "stage", "allocated MiB", "max allocated MiB", "reserved MiB", "max reserved MiB")


def render(record: Record, timeline: Timeline, figures: Statistics, verdict: Verdict | None = None) -> str:
    """The page `index.html` of a run, as HTML."""
    notes = [*record.notes, *timeline.notes]
    if record.plan.timeline and not figures.steady.any():
        notes.append("no complete iteration after the first in the events yet: no bubble and no times per stage")
    body = "\n".join(
        [
            f'<header><p class="crumbs">tdpp run</p><h1>{escape(record.name)}</h1>'
            '<nav><a href="timeline.html">Timeline of all ranks →</a></nav></header>',
            "<main>",
            _verdict(verdict),
            _failures(record),
            _figures(record, figures),
            missing(notes),
            f"<section><h2>Plan</h2>{_plan(record.plan)}</section>",
            f'<section><h2>Course</h2><div class="charts">{_charts(record, figures)}</div></section>',
            f"<section><h2>Stages</h2>{_stages(record.plan, figures)}</section>"
            if record.upstream is None
            else _upstream(record.upstream, record.plan),
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
    ideal = f"ideal 1F1B: {ideal_bubble(plan.pipeline, plan.micro_batches):.1%}"
    after = "median of the log lines after the first" if len(record.metrics) > 1 else "mean since the start"
    cards = [
        ("Iteration", f"{reached} of {plan.iterations}", "last logged"),
        ("Loss", _number(last.get("loss"), ".4f"), f"mean up to iteration {reached}" if last else ""),
        ("Iteration time", _number(_settled(record, "elapsed_ms"), ",.1f", " ms"), after),
        ("Tokens per second", _number(_settled(record, "tokens_per_s"), ",.0f"), after),
        ("Bubble", _number(figures.bubble, ".1%"), f"mean over ranks · {ideal}"),
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


def _plan(plan: Plan) -> str:
    model = plan.model
    kinds = Counter(node.gpu for node in plan.nodes)
    counted = ", ".join(f"{count} × {gpu}" for gpu, count in kinds.items())
    sentences = [
        f"{len(plan.ranks)} ranks = {plan.pipeline} pipeline stages × {plan.data} data-parallel replicas × "
        f"{plan.tensor} tensor-parallel, on {_plural(len(plan.nodes), 'node')} ({counted}), device {plan.device}.",
        f"The {model['layers']} transformer layers are cut {'-'.join(map(str, plan.partition))}; the first stage "
        "also has the embedding, the last one the final norm and the head.",
        f"Each iteration trains on {plan.global_batch_size} samples of {model['sequence_length']} tokens: "
        f"{_plural(plan.micro_batches, 'micro-batch', 'es')} of {plan.micro_batch_size} per replica, schedule "
        f"{plan.schedule}.",
        f"Model: hidden {model['hidden']}, {model['heads']} heads, vocabulary {model['vocab_size']} "
        f"(padded {model['padded_vocab_size']}).",
        *(["Megatron-LM trained it."] if plan.engine == "megatron_lm" else []),
    ]
    rows = [(node.name, node.gpu, ", ".join(map(str, node.ranks)), _stages_of(plan, node.name)) for node in plan.nodes]
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return words + table(("node", "GPU", "ranks", "stages"), rows)


def _stages_of(plan: Plan, node: str) -> str:
    return ", ".join(map(str, sorted({rank.stage for rank in plan.ranks if rank.node == node})))


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending if count != 1 else ''}"


def _charts(record: Record, figures: Statistics) -> str:
    at = [float(line["iteration"]) for line in record.metrics]
    loss = Series("loss", at, [_finite(line, "loss") for line in record.metrics])
    logged = Series("mean between log lines", at, [_finite(line, "elapsed_ms") for line in record.metrics])
    seen = Series("first to last event", figures.iterations.tolist(), (figures.length_ns / 1e6).tolist(), line=False)
    time = [logged, seen] if len(figures.iterations) else [logged]
    return lines([loss], x_title="iteration", y_title="Loss", label="Loss over iterations") + lines(
        time,
        x_title="iteration",
        y_title="Iteration time, ms",
        label="Iteration time in milliseconds over iterations",
        from_zero=True,
    )


def _finite(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if value is not None else math.nan


def _stages(plan: Plan, figures: Statistics) -> str:
    rows = [
        (
            str(row.stage),
            _layers(plan, row.stage),
            *(
                f"{ms:,.1f}"
                for ms in (
                    row.forward_ms,
                    row.backward_ms,
                    row.wait_ms,
                    row.send_ms,
                    row.all_reduce_ms,
                    row.optimizer_ms,
                )
            ),
            f"{row.bubble:.1%}",
        )
        for row in stage_times(figures, [rank.stage for rank in plan.ranks])
    ]
    if not rows:
        return '<p class="none">no steady iteration in the events yet</p>'
    head = (
        "stage",
        "layers",
        "forward ms",
        "backward ms",
        "wait to receive ms",
        "send ms",
        "all-reduce ms",
        "optimizer ms",
        "bubble",
    )
    ideal = ideal_bubble(plan.pipeline, plan.micro_batches)
    return (
        table(head, rows, numeric=True)
        + '<p class="note">Per iteration; medians over the ranks of a stage and '
        + f"{_plural(int(figures.steady.sum()), 'steady iteration')} (complete, and not the first). "
        + f"{escape(BUBBLE)} With equal stages and free communication 1F1B has (p−1)/(m+p−1) = "
        + f"{plan.pipeline - 1}/{plan.micro_batches + plan.pipeline - 1} = {ideal:.1%}.</p>"
    )


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


def _layers(plan: Plan, stage: int) -> str:
    first = " + embedding" if stage == 0 else ""
    last = " + head" if stage == plan.pipeline - 1 else ""
    return f"{plan.partition[stage]}{first}{last}"


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
