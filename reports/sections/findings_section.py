"""The verdict on a run, and what else its nodes said: other configurations, errors, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from conf.visible import plural
from reports.figures.page import Names, bullets, table
from reports.readers.judgement import Complaint, Findings, Verdict

NODES_NAMED = 3
"""Of more nodes, their number is shown."""


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
