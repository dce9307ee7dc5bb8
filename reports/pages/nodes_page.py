"""The page of a cluster's machines over all runs: which are slow, throttle or fail, since when, and by which runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from conf.visible import plural
from reports.figures.chart import lines
from reports.figures.embed import embedded, page_with_figures
from reports.figures.page import Cell, Row, bullets, table

HEAD = ("host", "health", "GPU", "runs", "failed here", "rank-hours", "time beside others", "last seen")
RUN_HEAD = ("run", "began", "state", "rank-hours", "time beside others", "what failed here")
HEALTHY = "healthy"
LAST = 200
"""So many runs of a host are listed, the newest."""


def render(hosts: Sequence[Mapping[str, Any]], where: str) -> str:
    """The page, as HTML.

    Args:
        hosts: of each the `cells` under HEAD, its `health`, in words `why`, its `runs` (cells under RUN_HEAD, newest
            first), and `times` (seconds since 1970, and times as long as other hosts, oldest first).
        where: the folder of the runs.
    """
    bad = [host for host in hosts if host["health"] != HEALTHY]
    title = f"{plural(len(hosts), 'host')}, {f'{len(bad)} not' if bad else 'all'} healthy"
    reasons = [f"{host['cells'][0]}: {host['health']}: {host['why']}" for host in bad]
    note = (
        "Time beside others is how long a host's slowest rank computes for a micro-batch, over the median of other "
        "hosts with the same kind of GPU at the same work: stage, sizes, precision. Shown is the median of its last "
        "runs. Rank-hours count from a node's start to its end."
    )
    body = [
        f'<header><p class="crumbs">{escape(where)}</p><h1>{title}</h1></header><main>',
        f'<section><div class="bad">{bullets(reasons)}</div></section>' if reasons else "",
        f"<section><h2>Hosts</h2>{table(HEAD, [_row(host) for host in hosts])}",
        f'<p class="note">{escape(note)}</p></section>',
        *(_section(host) for host in sorted(hosts, key=lambda host: host["health"] == HEALTHY)),
        "</main>",
    ]
    return page_with_figures(f"{plural(len(hosts), 'host')} – tdpp", "\n".join(body))


def _row(host: Mapping[str, Any]) -> Row:
    name, health, *rest = host["cells"]
    tone = "good" if host["health"] == HEALTHY else "bad"
    return (name, Cell(f'<b class="state {tone}">{escape(health)}</b>'), *rest)


def _section(host: Mapping[str, Any]) -> str:
    times = host["times"]
    chart = ""
    if len(times) > 1:
        days = [(unix - times[0][0]) / 86400 for unix, _ in times]
        values = pd.Series([slower for _, slower in times], index=days, name="Time beside others")
        drawn = embedded(lines([values], x_title="days", title=str(values.name)), "time beside others over days")
        chart = f'<div class="charts">{drawn}</div>'
    more = len(host["runs"]) - LAST
    left_out = f'<p class="note">{plural(more, "older run")} left out.</p>' if more > 0 else ""
    listed = table(RUN_HEAD, [tuple(row) for row in host["runs"][:LAST]])
    opened = " open" if host["health"] != HEALTHY else ""
    return (
        f"<section><details{opened}><summary>{escape(host['cells'][0])}: {plural(len(host['runs']), 'run')}</summary>"
        f"{chart}{listed}{left_out}</details></section>"
    )
