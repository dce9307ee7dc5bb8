"""What the timeline page costs, beside one Plotly figure with all bars: python -m benchmarks.report

Simulates a run of 32 ranks (8 stages, 4 replicas), 16 micro-batches and 50 iterations, and prints for both pages the
CPU time to write (a process that reads the events and writes the page), the size beside Plotly itself, and the CPU
time that headless Chromium, all its processes together, needs to load it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from conf.rundir import RunDir
from reports import events, record
from reports.page import static
from tests.reports.chromium import ARGUMENTS, CHROMIUM
from tests.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=8, data=4, micro_batches=16, iterations=50, layers=48)
LOAD_LIMIT_MS = 300_000


@dataclass(frozen=True)
class Cost:
    write_cpu_s: float
    size_mb: float
    load_cpu_s: float


def write_plain(run: Path, page: Path) -> None:
    """All events as one Plotly figure, a trace per name, written as Plotly's own libraries do: JSON in a page."""
    known = record.read(RunDir(run))
    timeline = events.read_run({rank.rank: RunDir(run).rank_events(rank.rank) for rank in known.plan.ranks})
    origin = timeline.events["start_ns"].min()
    traces = []
    for index, name in enumerate(timeline.names):
        rows = timeline.events[timeline.events["name"] == index]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [known.plan.ranks[rank].label for rank in rows["rank"].tolist()],
                "base": ((rows["start_ns"] - origin) / 1e6).tolist(),
                "x": ((rows["end_ns"] - rows["start_ns"]) / 1e6).tolist(),
                "hovertext": [
                    f"{name}, iteration {iteration}, micro-batch {micro_batch}"
                    for iteration, micro_batch in zip(
                        rows["iteration"].tolist(), rows["micro_batch"].tolist(), strict=True
                    )
                ],
            }
        )
    page.write_text(
        f'<body><div id="figure"></div><script>{static("plotly-basic.min.js")}</script><script>'
        f'Plotly.newPlot("figure", {json.dumps(traces)}, {{barmode: "overlay", height: 900}})'
        ".then(() => { document.body.dataset.ready = 'yes'; });</script></body>"
    )


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
    size = (page.stat().st_size - len(static("plotly-basic.min.js").encode())) / 1e6
    return Cost(written, size, load_cpu_s(browser, page))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run, plain_page = Path(folder) / "runs/seed/20260101-000000-00000000", Path(folder) / "plain.html"
        count = sum(map(len, make_run(run, SHAPE)))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        ours = ["-c", f"from reports.cli import main; main([{str(run)!r}])"]
        theirs = [
            "-c",
            "from pathlib import Path; from benchmarks.report import write_plain; "
            f"write_plain(Path({str(run)!r}), Path({str(plain_page)!r}))",
        ]
        page = cost(browser, ours, run / "report/timeline.html")
        plain = cost(browser, theirs, plain_page)
        browser.close()
    print(f"{SHAPE.ranks} ranks, {SHAPE.iterations} iterations, {count:,} events")
    print(f"{'':30}{'tdpp report':>14}{'one figure':>14}{'ratio':>8}")
    for name, ours_is, plain_is in (
        ("CPU s to write", page.write_cpu_s, plain.write_cpu_s),
        ("MB beside Plotly", page.size_mb, plain.size_mb),
        ("CPU s to load", page.load_cpu_s, plain.load_cpu_s),
    ):
        print(f"{name:30}{ours_is:14.2f}{plain_is:14.2f}{plain_is / ours_is:7.1f}x")


if __name__ == "__main__":
    main()
