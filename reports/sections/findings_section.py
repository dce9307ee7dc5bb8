"""The verdict on a run, and what else its nodes said: other configurations, errors, warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from conf.run_folder.rundir import rank_ranges
from conf.visible import plural
from megatron_ext.contract.failure import RankFailure
from reports.facts.commands import ways_on
from reports.figures.page import Names, Row, bullets, copyable, table
from reports.readers.judgement import Complaint, Culprit, Findings, Verdict
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


def _grouped(complaints: Sequence[Complaint]) -> str:
    rows = [(str(one.count), some_nodes(one.nodes), one.text) for one in complaints]
    return table(("times", "nodes", "line"), rows)


def some_nodes(nodes: Sequence[str]) -> Names:
    *names, last = nodes[:NODES_NAMED]
    more = len(nodes) - NODES_NAMED
    return Names([*names, f"{last} and {more} more" if more > 0 else last])


HEAD = ("rank", "node", "kind", "error", "message")


def failures_section(record: Record, findings: Findings | None, last_iteration: int | None) -> str:
    """The section of a run's page, as HTML; nothing where nothing failed.

    Args:
        last_iteration: of the timeline, with which that opens; None without events.
    """
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
