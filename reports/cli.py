"""`tdpp report`: writes the pages of runs into their folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conf.rundir import RunDir, write_atomic
from reports import events, record, run_page, statistics, timeline_page
from reports.expected import expected
from reports.gpus import read_gpus
from reports.verdict import Findings


def main(argv: list[str], judge: Callable[[RunDir], Findings] | None = None) -> int:
    """Writes `report/index.html` and `report/timeline.html` of each run and prints their paths.

    Args:
        argv: arguments after `tdpp report`.
        judge: gives the verdict on a run, and what its nodes say; without it the page has neither.

    Raises:
        TdppError: a run cannot be found or has no usable plan.
    """
    parser = argparse.ArgumentParser(prog="tdpp report", description="Write the pages of a run: summary and timeline.")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run folder, name or job id; without any, the latest run"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")
    arguments = parser.parse_args(argv)
    for wanted in arguments.runs or [None]:
        run = RunDir.find(arguments.runs_dir, wanted)
        for path in write(run, judge(run) if judge else None):
            print(path)
    return 0


def write(run: RunDir, findings: Findings | None) -> tuple[Path, Path]:
    """Writes both pages of a run; says on stderr what they lack."""
    known = record.read(run)
    prediction, why = expected(run, known)
    known = replace(known, notes=(*known.notes, *why))
    ranks = [rank.rank for rank in known.plan.ranks]
    timeline = events.read_run({rank: run.rank_events(rank) for rank in ranks} if known.plan.timeline else {})
    figures = statistics.statistics(timeline, len(ranks))
    for note in (*known.notes, *timeline.notes):
        print(f"{run.name}: {note}", file=sys.stderr)
    run.report.mkdir(exist_ok=True)
    index, all_ranks = run.report / "index.html", run.report / "timeline.html"
    write_atomic(index, run_page.render(known, timeline, figures, findings, prediction, read_gpus(run, known)))
    write_atomic(all_ranks, timeline_page.render(known, timeline, figures))
    return index, all_ranks
