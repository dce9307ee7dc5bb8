"""What the timeline page costs, beside one Plotly figure with all bars: python -m benchmarks.report [--large]

Makes what a run of 32 ranks (8 stages, 4 replicas), 16 micro-batches and 50 iterations leaves: tdpp's event files, and
the text log of the FASOP authors' Megatron-LM (201,600 calls of timers); with `--large` also the event files of 512
ranks. Prints for both pages the CPU time to write (a process that reads the files and writes the page), its size,
and the CPU time that headless Chromium, all its processes together, needs to load it. The figure is made by the same
reader, so that it shows what drawing alone costs; of the large run it is not tried.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from plotly import graph_objects as go

from reports.readers.megatron_log import Sizes
from reports.readers.record import rank_label
from reports.sources import Source
from tests.support.reports import legacy
from tests.support.reports.chromium import ARGUMENTS, CHROMIUM
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=8, data=4, micro_batches=16, iterations=50, layers=48)
LARGE = replace(SHAPE, data=64, iterations=58)
JOB = legacy.Job(pipeline=8, data=4, micro_batches=16, iterations=50, interval=10)
TITLES = {"write_cpu_s": "CPU s to write", "size_mb": "MB", "load_cpu_s": "CPU s to load"}
LOAD_LIMIT_MS = 300_000


@dataclass(frozen=True)
class Cost:
    write_cpu_s: float
    size_mb: float
    load_cpu_s: float


def write_plain(source: Path, page: Path) -> None:
    """All events as one Plotly figure, a trace per name, as a user of Plotly would write it."""
    found = Source.find(Path(), str(source), Sizes()).read()
    events, ranks = found.timeline.events, found.record.plan.ranks
    origin = events["start_ns"].min()
    figure = go.Figure(layout={"barmode": "overlay", "height": 900})
    for name, rows in events.groupby("name", observed=True):
        figure.add_bar(
            orientation="h",
            name=str(name),
            y=[rank_label(ranks[rank]) for rank in rows["rank"]],
            base=(rows["start_ns"] - origin) / 1e6,
            x=(rows["end_ns"] - rows["start_ns"]) / 1e6,
            customdata=rows[["iteration", "micro_batch"]],
            hovertemplate="%{y}, iteration %{customdata[0]}, micro-batch %{customdata[1]}",
        )
    figure.write_html(page, post_script="document.body.dataset.ready = 'yes';")


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def browser_cpu_s() -> float:
    """CPU time so far of every living Chromium process below this one."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().rsplit(")", 1)
        except OSError:  # ended in between
            continue
        values = fields.split()
        stats[int(path.parent.name)] = (name.split("(", 1)[1], int(values[1]), int(values[11]) + int(values[12]))
    total, own = 0, {os.getpid()}
    for pid, (name, parent, ticks) in sorted(stats.items()):
        if parent in own:
            own.add(pid)
            total += ticks if "chromium" in name else 0
    return total / os.sysconf("SC_CLK_TCK")


def load_cpu_s(browser: Browser, page_file: Path) -> float:
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})
    page = context.new_page()
    before = browser_cpu_s()
    page.goto(page_file.as_uri(), timeout=LOAD_LIMIT_MS)
    page.wait_for_selector("body[data-ready]", timeout=LOAD_LIMIT_MS)
    page.screenshot(timeout=LOAD_LIMIT_MS)  # what was drawn is also painted
    spent = browser_cpu_s() - before
    context.close()
    return spent


def cost(browser: Browser, command: list[str], page: Path) -> Cost:
    before = children_cpu_s()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    written = children_cpu_s() - before
    return Cost(written, page.stat().st_size / 1e6, load_cpu_s(browser, page))


def compare(browser: Browser, title: str, source: Path, report: Path, plain_page: Path | None) -> None:
    """Prints what both pages of a run folder or a log cost."""
    code = f"from launch.commands.report import main; main([{str(source)!r}], None)"
    page = cost(browser, ["-c", code], report / "timeline.html")
    plain = None
    if plain_page is not None:
        call = f"write_plain(Path({str(source)!r}), Path({str(plain_page)!r}))"
        code = f"from pathlib import Path; from benchmarks.report import write_plain; {call}"
        plain = cost(browser, ["-c", code], plain_page)
    print(f"\n{title}\n{'':16}{'tdpp report':>14}{'one figure':>14}{'ratio':>8}")
    for name in ("write_cpu_s", "size_mb", "load_cpu_s"):
        ours = getattr(page, name)
        theirs = f"{getattr(plain, name):14.2f}{getattr(plain, name) / ours:7.1f}x" if plain else f"{'-':>14}"
        print(f"{TITLES[name]:16}{ours:14.2f}{theirs}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--large", action="store_true", help="also a run of 512 ranks")
    large = parser.parse_args().large
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        base = Path(folder)
        run, log = base / "runs/seed/20260101-000000-00000000", base / "n067.out"
        count = sum(map(len, make_run(run, SHAPE)))
        known = legacy.calls(JOB)
        log.write_text(legacy.job_info(JOB, 7) + legacy.log(JOB, known))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        shape = f"{SHAPE.ranks} ranks, {SHAPE.iterations} iterations"
        compare(browser, f"{shape}, {count:,} events in event files", run, run / "report", base / "plain.html")
        title = f"{shape}, {len(known):,} calls in a text log of {log.stat().st_size / 1e6:.1f} MB"
        compare(browser, title, log, log.with_suffix(".report"), base / "plain-log.html")
        if large:
            del known
            run = base / "runs/large/20260101-000000-00000000"
            count = sum(map(len, make_run(run, LARGE)))
            title = f"{LARGE.ranks} ranks, {LARGE.iterations} iterations, {count:,} events in event files"
            compare(browser, title, run, run / "report", None)
        browser.close()


if __name__ == "__main__":
    main()
