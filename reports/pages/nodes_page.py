"""The page of a cluster's machines over all runs: which are slow, throttle or fail, since when, and by which runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from conf.visible import plural
from reports.figures.chart import lines
from reports.figures.embed import embedded, framed
from reports.figures.page import Cell, Row, bullets, table

LAST = 200
"""So many runs of a host are listed, the newest."""


def render(
    hosts: Sequence[Mapping[str, Any]],
    links: Sequence[str],
    where: str,
    columns: Sequence[str],
    run_columns: Sequence[str],
) -> str:
    """The page, as HTML.

    Args:
        hosts: of each the `cells` of `columns`, beginning with its name and health; why it is not healthy, as `reason`,
            else empty; its `runs` (cells of `run_columns`, newest first); and `times` (seconds since 1970, and times as
            long as other hosts, oldest first).
        links: slow ones between two hosts, in words.
        where: the folder of the runs.
        columns: of the table of hosts.
        run_columns: of that of a host's runs.
    """
    bad = [host for host in hosts if host["reason"]]
    title = f"{plural(len(hosts), 'host')}, {f'{len(bad)} not' if bad else 'all'} healthy"
    reasons = [*(host["reason"] for host in bad), *links]
    note = (
        "Time beside others is how long a host's slowest rank computes for a micro-batch, over the median of other "
        "hosts with the same kind of GPU at the same work: stage, sizes, precision. Shown is the median of its last "
        "runs. Rank-hours count from a node's start to its end."
    )
    parts = [
        f'<section><div class="bad">{bullets(reasons)}</div></section>' if reasons else "",
        f"<section><h2>Hosts</h2>{table(columns, [_row(host) for host in hosts])}",
        f'<p class="note">{escape(note)}</p></section>',
        *(_section(host, run_columns) for host in sorted(hosts, key=lambda host: not host["reason"])),
    ]
    return framed(plural(len(hosts), "host"), where, title, parts)


def _row(host: Mapping[str, Any]) -> Row:
    name, health, *rest = host["cells"]
    tone = "bad" if host["reason"] else "good"
    return (name, Cell(f'<b class="state {tone}">{escape(health)}</b>'), *rest)


def _section(host: Mapping[str, Any], columns: Sequence[str]) -> str:
    times = host["times"]
    chart = ""
    if len(times) > 1:
        days = [(unix - times[0][0]) / 86400 for unix, _ in times]
        values = pd.Series([slower for _, slower in times], index=days, name="Time beside others")
        drawn = embedded(lines([values], x_title="days", title=str(values.name)), "time beside others over days")
        chart = f'<div class="charts">{drawn}</div>'
    more = len(host["runs"]) - LAST
    left_out = f'<p class="note">{plural(more, "older run")} left out.</p>' if more > 0 else ""
    listed = table(columns, [tuple(row) for row in host["runs"][:LAST]])
    opened = " open" if host["reason"] else ""
    return (
        f"<section><details{opened}><summary>{escape(host['cells'][0])}: {plural(len(host['runs']), 'run')}</summary>"
        f"{chart}{listed}{left_out}</details></section>"
    )
