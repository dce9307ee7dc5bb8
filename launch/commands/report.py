"""`tdpp report`: writes the pages of runs into their folders."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import socket
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import TdppError
from conf.reading.parser import Parser, option
from conf.reading.values import NoValue, port, whole
from conf.run_folder.run_folders import usual_runs_dir
from conf.schema.profile import Tracker
from conf.visible import visible
from launch.commands.run_arguments import runs_folder
from launch.errors import LaunchError
from launch.judge.findings import all_findings
from launch.judge.state import print_next
from launch.screen import remark
from launch.tracking.run_info import require_ready

if TYPE_CHECKING:
    from reports.pages.writing import Judge, Written
    from reports.sources import Source

TRACKERS = {
    Tracker.tensorboard: "TensorBoard event files, in tensorboard/ of the run's folder",
    Tracker.wandb: "to Weights & Biases",
    Tracker.mlflow: "to MLflow",
}


EXPORTS = ("trace", "csv", "png")
SIZES = ("tensor", "data", "pipeline")
"""Parallel sizes, of a log that does not say them."""


def main(argv: Sequence[str], judge: Judge | None = all_findings) -> int:
    """Writes `report/index.html` and `report/timeline.html` of each run, of several a comparison; prints their paths.

    Raises:
        TdppError: a run cannot be found or has no usable plan, or a file is not a log; of several files and folders,
            those that are neither are left out and named on stderr, unless all are.
    """
    arguments = parser().parse_args(argv)
    if arguments.serve or arguments.port is not None:
        return _serve(arguments)
    # What draws pages takes a while to import, which help does not wait for.
    from reports.exports import Export, browser_here, write_exports
    from reports.pages.writing import compared, skip_unreadable, watch, write_all
    from reports.readers.megatron_log import Sizes
    from reports.sources import Source, all_of, placed

    sizes = Sizes(tensor=arguments.tensor, data=arguments.data, pipeline=arguments.pipeline)
    exports = [export for export in Export if getattr(arguments, export)]
    browser = browser_here() if Export.png in exports else None
    trackers = [tracker for tracker in Tracker if getattr(arguments, tracker)]
    require_ready(trackers, os.environ, "tdpp report --{}")
    wanted: list[str | None] = [one for given in arguments.runs for one in all_of(given)] or [None]
    notes = set[str]()
    sources = skip_unreadable(lambda one: Source.find(arguments.runs_dir, one, sizes), wanted, notes)
    if arguments.output is not None:
        sources = placed(sources, arguments.output)
    if arguments.search:
        _search(sources)
    if arguments.watch:
        watch(sources, judge, notes, arguments.output)
    rounds = write_all(sources, judge, notes)
    for written in rounds:
        for path in written.pages if not arguments.watch else ():
            print(path)
        for path in write_exports(exports, written.found, written.pages[1], browser):
            print(path)
        for place in _tracked(trackers, written):
            print(place)
    compared_pages = compared(rounds, arguments.output)
    for path in compared_pages:
        if not arguments.watch:
            print(path)
    if not (arguments.open or arguments.watch):
        once = {f"--{name}" for name in ("search", *EXPORTS, *TRACKERS)}
        words = shlex.join(["tdpp", "report", *(word for word in argv if word not in once), "--open"])
        print_next(f"{words}  # in a browser; on a machine without one, --serve instead of --open")
    if arguments.open:
        show([*(written.pages[0] for written in rounds), *compared_pages][-1])
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Serves the pages until Ctrl-C. Raises TdppError: no such folder or run, the port cannot be had, or an option is
    for pages that are written."""
    if not arguments.serve:
        raise LaunchError(f"--port {arguments.port} works only with --serve: add --serve, or leave it out")
    writing = ("watch", "search", "output", "open", *EXPORTS, *TRACKERS, *SIZES)
    if given := [f"--{name}" for name in writing if getattr(arguments, name)]:
        raise LaunchError(f"{given[0]} does not work with --serve, which writes no files; leave one of the two out")
    folder = runs_folder(arguments)
    from launch.commands.serving.library import Library
    from launch.commands.serving.server import HOST, PORT, Server

    library = Library(folder, arguments.runs)
    library.check()
    with Server(library, PORT if arguments.port is None else arguments.port) as server:
        print(server.address, flush=True)
        forward = f"ssh -L {server.server_port}:{HOST}:{server.server_port} {socket.gethostname()}"
        remark(f"to open it from another machine: {forward}; Ctrl-C ends the server")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _search(sources: Sequence[Source]) -> None:
    """Searches plans for the GPUs of each run; says on stderr of which that cannot be done. Raises TdppError: of the
    only one."""
    for source in sources:
        try:
            source.search()
        except TdppError as error:
            if len(sources) == 1:
                raise
            print(visible(f"no plan was searched: {error}"), file=sys.stderr)


def show(page: Path) -> None:
    """Shows a page in this user's browser; where there is none, says where the page is."""
    if not webbrowser.open(page.absolute().as_uri()):
        print(f"no browser found here; open {page.absolute()} yourself", file=sys.stderr)


def _tracked(trackers: Sequence[Tracker], written: Written) -> Iterator[str]:
    """Carries a run's metrics to the trackers; where to look for them."""
    if not trackers:
        return
    from launch.tracking.writer import write

    record = written.found.record
    if written.run is None:
        raise LaunchError(f"--{trackers[0]} takes runs of tdpp, but {record.log} is a log of Megatron-LM; leave it out")
    for tracker in trackers:
        yield write(tracker, written.run, record.lines())


def _folder(text: str) -> Path:
    if Path(text).suffix.lower() in (".html", ".htm", ".gz", ".csv", ".png"):
        raise NoValue("is the name of a file; give a folder: a report is several files")
    return Path(text)


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="tdpp report",
        description="Write the pages of a run or of a Megatron-LM log: a summary and a timeline. "
        "With several RUNs, also compare them.",
    )
    made.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run folder, name, job id or latest (default: the latest run); a folder of runs stands for all its "
        "runs; also a log of Megatron-LM, or a folder with the .out files of a job's nodes",
    )
    made.add_argument(
        "--runs-dir",
        type=Path,
        default=usual_runs_dir(),
        metavar="DIR",
        help="where runs are (default: TDPP_RUNS_DIR, or runs)",
    )
    made.add_argument(
        "--watch", action="store_true", help="rewrite the pages until the run is over; open pages reload themselves"
    )
    made.add_argument(
        "--search",
        action="store_true",
        help="also search for a faster plan on the GPUs of each run (takes seconds), and keep it for later pages",
    )
    made.add_argument(
        "--serve",
        action="store_true",
        help="serve the runs of --runs-dir, or only RUNs, to a browser on this machine until Ctrl-C; write nothing",
    )
    made.add_argument(
        "--port", type=option(port), metavar="N", help="with --serve: the port (default: 8000; 0 takes a free one)"
    )
    made.add_argument(
        "--open", action="store_true", help="also open the page in a browser (with several RUNs, the comparison)"
    )
    made.add_argument(
        "--output",
        type=option(_folder),
        metavar="FOLDER",
        help="write into FOLDER instead of the run's folder; each of several runs gets its own folder in it",
    )
    made.add_argument("--trace", action="store_true", help="also write a trace for Perfetto, trace.json.gz")
    made.add_argument("--csv", action="store_true", help="also write the tables events.csv and metrics.csv")
    made.add_argument("--png", action="store_true", help="also write a PNG of the timeline; needs Chromium or Chrome")
    for tracker, where in TRACKERS.items():
        made.add_argument(f"--{tracker}", action="store_true", help=f"also write {where} (docs/trackers.md)")
    sizes = made.add_argument_group("parallel sizes, for a log that does not contain them")
    for name in SIZES:
        sizes.add_argument(f"--{name}", type=option(whole), metavar="N")
    return made
