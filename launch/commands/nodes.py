"""`tdpp nodes`: the machines of a cluster over all runs, which of them are slow or fail, and since when."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.reading.files import write_whole
from conf.reading.parser import Parser
from conf.visible import nearest, plural, visible
from launch.commands.run_arguments import add_runs_dir, runs_folder
from launch.errors import LaunchError
from launch.history import ledger
from launch.history.hosts import Host, Run, hosts_of
from launch.screen import ago, plain, some

COLUMNS = ("host", "health", "GPU", "runs", "failed here", "rank-hours", "time beside others", "last seen")
RUN_COLUMNS = ("run", "began", "state", "rank-hours", "time beside others", "what failed here")


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    folder = runs_folder(arguments)
    hosts = hosts_of(ledger.records(folder, _progress))
    if not hosts:
        raise LaunchError(f"--runs-dir {folder}: no run there is over, so nothing is known of any host")
    chosen = hosts if arguments.host is None else [_named(hosts, arguments.host)]
    if arguments.page is not None:
        from reports.pages import nodes_page

        links = [link for host in chosen for link in host.slow_links]
        page = nodes_page.render([_line(host) for host in chosen], links, str(folder.absolute()), COLUMNS, RUN_COLUMNS)
        write_whole(arguments.page, page)
        print(arguments.page)
    elif arguments.json:
        print(json.dumps([_object(host) for host in chosen]))
    elif arguments.host is not None:
        _print_one(chosen[0])
    else:
        print(visible(plain(COLUMNS, [cells(host) for host in hosts])))
        for told in [*(str(host) for host in hosts if host.why), *(link for host in hosts for link in host.slow_links)]:
            print(visible(told))
    return 0


def parser() -> Parser:
    made = Parser(prog="tdpp nodes", description="Show the machines over all runs: healthy, slow or failing ones.")
    made.add_argument("host", nargs="?", help="one machine, with the runs behind what is said of it")
    add_runs_dir(made)
    made.add_argument("--json", action="store_true", help="print a JSON list with one object per host")
    made.add_argument("--page", type=Path, metavar="FILE", help="write a page with all of it, which opens offline")
    return made


def _progress(left: int) -> None:
    """Show how many runs are still to be read that nobody has looked at since they ended; later looks find their
    records."""
    if sys.stderr.isatty():
        print(f"\r{plural(left, 'run')} to be read ", end="" if left > 1 else "\r\033[K", file=sys.stderr, flush=True)


def _named(hosts: Sequence[Host], name: str) -> Host:
    for host in hosts:
        if name in (host.name, *host.before):
            return host
    raise LaunchError(
        f"no run was on a host {name!r}; {nearest(name, [host.name for host in hosts])}'tdpp nodes' lists all"
    )


def _beside(slower: float | None) -> str:
    return "-" if slower is None else f"{slower:.2f}"


def cells(host: Host) -> list[str]:
    """Its line in the table, by `COLUMNS`."""
    name = f"{host.name} (before: {some(host.before, 2)})" if host.before else host.name
    return [
        name,
        str(host.health),
        host.gpu,
        str(len(host.runs)),
        str(sum(run.failed for run in host.runs)),
        f"{host.rank_hours:.1f}",
        _beside(host.slower),
        ago(time.time() - host.runs[-1].run.ended_unix),
    ]


def run_cells(run: Run) -> list[str]:
    """A run's line, by `RUN_COLUMNS`."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.run.began_unix))
    failed = f"{run.node.rule}: {run.node.reason}" if run.failed else "; ".join(run.node.troubles[:1])
    hours = f"{run.node.rank_hours:.2f}"
    return [run.run.run, began, str(run.run.state), hours, _beside(run.slower), failed]


def _print_one(host: Host) -> None:
    print(visible("\n".join([str(host), *host.slow_links])))
    print(visible(plain(RUN_COLUMNS, [run_cells(run) for run in host.runs])))


def _object(host: Host) -> dict[str, Any]:
    return {
        "host": host.name,
        "before": list(host.before),
        "health": str(host.health),
        "why": host.why,
        "gpu": host.gpu,
        "uuids": list(host.runs[-1].node.uuids),
        "driver": host.driver[0] if host.driver else None,
        "slow_links": host.slow_links,
        "rank_hours": round(host.rank_hours, 4),
        "slower": host.slower,
        "runs": [
            {
                "run": run.run.run,
                "began_unix": run.run.began_unix,
                "state": str(run.run.state),
                "node": run.node.node,
                "rank_hours": run.node.rank_hours,
                "slower": run.slower,
                "rule": run.node.rule,
                "reason": run.node.reason,
                "throttled": run.node.throttled,
                "troubles": list(run.node.troubles),
            }
            for run in host.runs
        ],
    }


def _line(host: Host) -> dict[str, Any]:
    """What the page shows of a host."""
    return {
        "cells": cells(host),
        "reason": str(host) if host.why else "",
        "runs": [run_cells(run) for run in reversed(host.runs)],
        "times": [(run.run.began_unix, run.slower) for run in host.runs if run.slower is not None],
    }
