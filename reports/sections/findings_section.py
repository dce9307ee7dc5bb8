"""The verdict on a run, what else its nodes said (configurations, errors, warnings), and the commands that follow."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from conf.reading.words import with_values
from conf.run_folder.judgement import Culprit, Findings, LineGroup, Verdict
from conf.visible import plural, rank_ranges
from megatron_ext.contract.errors import RankFailure
from reports.figures.page import Names, Row, bullets, copyable, table
from reports.readers.record import Record

NODES_NAMED = 3
"""The number of more nodes is shown."""


def verdict_section(verdict: Verdict) -> str:
    tone = "good" if verdict.state == "succeeded" else "bad" if verdict.exit_code else "open"
    return (
        f'<section class="verdict {tone}"><h2>{escape(verdict.state)}</h2>'
        f'<p class="reason">{escape(verdict.reason)}</p>{bullets(verdict.evidence)}'
        f'<p class="rule">Rule: {escape(verdict.rule)} · exit code {verdict.exit_code}</p></section>'
    )


def nodes_section(findings: Findings) -> str:
    """What nodes run that was not submitted, and their stderr; nothing where they say neither."""
    parts = []
    if findings.mismatches:
        parts.append(f'<h3>Not as submitted</h3><div class="bad">{bullets(findings.mismatches)}</div>')
    parts += [f"<h3>Errors</h3>{_grouped(findings.stderr)}"] if findings.stderr else []
    parts += [f"<h3>Lost agents</h3>{_grouped(findings.agents)}"] if findings.agents else []
    if findings.warnings:
        count = sum(one.count for one in findings.warnings)
        parts.append(
            f"<details><summary>{plural(count, 'warning')} of {plural(len(findings.warnings), 'kind')}</summary>"
            f"{_grouped(findings.warnings)}</details>"
        )
    return f"<section><h2>What the nodes say</h2>{''.join(parts)}</section>" if parts else ""


def _grouped(complaints: Sequence[LineGroup]) -> str:
    rows = [(str(one.count), some_nodes(one.nodes), one.text) for one in complaints]
    return table(("times", "nodes", "line"), rows)


def some_nodes(nodes: Sequence[str]) -> Names:
    *names, last = nodes[:NODES_NAMED]
    more = len(nodes) - NODES_NAMED
    return Names([*names, f"{last} and {more} more" if more > 0 else last])


HEAD = ("rank", "node", "kind", "error", "message")


def failures_section(record: Record, findings: Findings | None, last_iteration: int | None) -> str:
    """The section of a run's page, as HTML; nothing where nothing failed. `last_iteration`: of the timeline, with which
    that opens; None without events."""
    culprit = findings.culprit if findings else None
    steps = ways_on(record, findings) if findings else []
    if not (record.failures or culprit or steps):
        return ""
    rows = [*_culprit_rows(record, culprit), *_rows(record.failures, culprit)]
    title = "Next step" if not rows else "Failed ranks" if record.failures else "Cause"
    link = ""
    if rows and last_iteration is not None:
        link = f'<p><a href="timeline.html">The timeline of its last iteration, {last_iteration} →</a></p>'
    commands = "".join(f"<p>{escape(step.means)}:</p>{copyable(step.command)}" for step in steps)
    next_step = f"{'<h3>Next step</h3>' if rows else ''}{commands}" if steps else ""
    drawn = table(HEAD, rows) if rows else ""
    return f"<section><h2>{title}</h2>{drawn}{_last_words(culprit)}{link}{next_step}</section>"


def _last_words(culprit: Culprit | None) -> str:
    if culprit is None:
        return ""
    if not culprit.said:
        return '<p class="none">It wrote nothing to its logs.</p>'
    return "".join(
        f"<h3>The last {'line' if len(one.lines) == 1 else f'{len(one.lines)} lines'} of {escape(str(one.path))}</h3>"
        f'<pre class="log">{escape(chr(10).join(one.lines))}</pre>'
        for one in culprit.said
    )


def _culprit_rows(record: Record, culprit: Culprit | None) -> Iterator[Row]:
    """A culprit that reported no error itself: it stood still, or its node is lost."""
    reported = {one.rank for one in record.failures if not one.symptom}
    if culprit is not None and not reported & {*culprit.ranks}:
        ranks = rank_ranges(culprit.ranks) if culprit.ranks else "–"
        yield (ranks, some_nodes([culprit.node]), "cause", "", culprit.what)


def _rows(failures: Sequence[RankFailure], culprit: Culprit | None) -> Iterator[Row]:
    """Failures, those alike together: messages that differ only in numbers, such as addresses, are one row with the
    first of them. The culprit's comes first, and other causes before what they caused."""
    first = culprit.ranks if culprit else ()
    known = culprit is not None and not {*first} & {one.rank for one in failures if not one.symptom}
    alike: dict[tuple[bool, str, str], list[RankFailure]] = {}
    for one in sorted(failures, key=lambda one: (one.rank not in first, one.symptom, one.rank)):
        alike.setdefault((one.symptom or known, one.type, re.sub(r"\d+", "#", one.message)), []).append(one)
    for (symptom, type_, _), ranks in alike.items():
        yield (
            rank_ranges(sorted(one.rank for one in ranks)),
            some_nodes(list(dict.fromkeys(one.node for one in ranks))),
            "caused by another" if symptom else "cause",
            type_,
            ranks[0].message,
        )


class NextStep(NamedTuple):
    """What to type, and what comes of it."""

    command: str
    means: str


def launch_with(overrides: Sequence[str], changes: Mapping[str, str]) -> str:
    """`tdpp launch` with these overrides, of which `changes` take the place of those for the same keys."""
    return shlex.join(["tdpp", "launch", *with_values(overrides, changes)])


def ways_on(record: Record, findings: Findings) -> list[NextStep]:
    """Returns the ways on from a failed run, the most likely first; none where it goes on or was read from a log."""
    verdict, plan, path = findings.verdict, record.plan, record.diff.parent
    if record.log is not None or verdict.state in ("succeeded", "running", "starting"):
        return []
    resume = shlex.join(["tdpp", "launch", f"resume={path}"])
    saved = (path / "checkpoints/latest").exists()
    if not findings.over:
        again = resume if plan.resumable else launch_with(record.overrides, {})
        means = "Stop it and resume from its newest checkpoint" if saved else "Stop it and start it again"
        return [NextStep(f"{shlex.join(['tdpp', 'stop', str(path)])} && {again}", means)]
    weights = {"train.load": str(path)} if saved else {}
    from_weights = " from its saved weights" if saved else ""
    if findings.verdict.state == "not finite" or any(one.type == "NotFinite" for one in record.failures):
        lower = weights | {"train.lr": f"{plan.train.lr / 2:.6g}"}
        return [
            NextStep(launch_with(record.overrides, lower), f"Start a new run{from_weights} with half the learning rate")
        ]
    steps = []
    if (fewer := plan.micro_batch_size // 2) and _out_of_memory(record, findings) and plan.adapt is None:
        smaller = weights | {"parallel.micro_batch_size": str(fewer)}
        means = f"Start a new run{from_weights} with micro-batches of {fewer}, which take less memory"
        steps.append(NextStep(launch_with(record.overrides, smaller), means))
    if plan.resumable:
        means = "Resume from its newest checkpoint" if saved else "Start it again; it saved no checkpoint"
        steps.append(NextStep(resume, means))
    if not plan.resumable or plan.model.traits.user_code:
        means = f"Start a new run{from_weights}"
        means += " once model.code is changed" if plan.resumable else "; this one cannot be resumed"
        steps.append(NextStep(launch_with(record.overrides, weights), means))
    return steps


def _out_of_memory(record: Record, findings: Findings) -> bool:
    causes = (one for one in record.failures if not one.symptom)
    return findings.verdict.rule == "out-of-memory" or any(
        one.type == "OutOfMemoryError" or re.search(r"\bout of memory\b", one.message) for one in causes
    )
