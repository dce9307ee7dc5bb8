"""`tdpp report`: writes the pages of runs into their folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from conf.rundir import RunDir, write_atomic
from reports import run_page, statistics, timeline_page
from reports.errors import ReportError
from reports.megatron_log import Sizes
from reports.sources import Source
from reports.verdict import Findings

Judge = Callable[[RunDir], Findings]


def main(argv: list[str], judge: Judge | None = None) -> int:
    """Writes `report/index.html` and `report/timeline.html` of each run and prints their paths.

    Args:
        argv: arguments after `tdpp report`.
        judge: gives the verdict on a run, and what its nodes say; without it the page has neither.

    Raises:
        TdppError: a run cannot be found or has no usable plan, or a file is no log.
    """
    arguments = _parser().parse_args(argv)
    sizes = Sizes(tensor=arguments.tensor, data=arguments.data, pipeline=arguments.pipeline)
    for wanted in arguments.runs or [None]:
        source = Source.find(arguments.runs_dir, wanted, sizes)
        for path in write(source, judge):
            print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tdpp report", description="Write the pages of a run or of a Megatron-LM log: summary and timeline."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, name or job id; or a log of Megatron-LM, or the folder with the .out files of a job's nodes; "
        "without any, the latest run",
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")
    sizes = parser.add_argument_group("parallel sizes of a log that does not say them")
    for name in ("tensor", "data", "pipeline"):
        sizes.add_argument(f"--{name}", type=_positive, metavar="N")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


def write(source: Source, judge: Judge | None) -> list[Path]:
    """Writes both pages; says on stderr what they lack."""
    found = source.read()
    known, timeline = found.record, found.timeline
    figures = statistics.statistics(timeline, len(known.plan.ranks))
    findings = judge(source.run) if judge and source.run else None
    for note in (*known.notes, *timeline.notes):
        print(f"{known.name}: {note}", file=sys.stderr)
    index, all_ranks = source.report / "index.html", source.report / "timeline.html"
    try:
        source.report.mkdir(exist_ok=True)
        write_atomic(index, run_page.render(known, timeline, figures, findings, found.prediction, found.gpus))
        write_atomic(all_ranks, timeline_page.render(known, timeline, figures, found.prediction))
    except OSError as error:
        raise ReportError(f"{source.report}: cannot be written ({error.strerror})") from error
    return [index, all_ranks]
