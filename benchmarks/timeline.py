"""What a redraw of the timeline of 512 ranks costs: python -m benchmarks.timeline

Opens the page of 8 stages with 64 replicas and 16 micro-batches in headless Chromium, and redraws several views of it.
For each it prints the main thread's CPU time of a redraw (Performance.getMetrics of the DevTools protocol, in thread
ticks), that of all of Chromium's processes together, which includes painting, and what was drawn.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import CDPSession, Page, sync_playwright

from benchmarks.report import LARGE, browser_cpu_s
from launch.commands.report import main as report
from tests.support.reports.chromium import ARGUMENTS, CHROMIUM
from tests.support.reports.synthetic import make_run

SHAPE = replace(LARGE, iterations=6)
REDRAWS = 20
REDRAW = "chart.redraw()"
VIEWS = {
    "as it opens": ("chart.times = null", REDRAW),
    "all ranks": ("toggleAll()", REDRAW),
    "a tenth of it": ("chart.times = [0.4 * chart.length, 0.5 * chart.length]", REDRAW),
    "the last ranks": ("chart.times = null; chart.box.scrollTop = 1e6", REDRAW),
    "another iteration": ("", "show(view.iteration ? 0 : 1)"),
    "a selection": ("chart.select(chart.shown.bars.at(-1).i)", REDRAW),
    "on paper": ("document.documentElement.dataset.printing = ''", REDRAW),
}
"""How each is reached from the one before, and what draws it again."""


def main_thread_s(session: CDPSession) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def redraws(page: Page, count: int, again: str) -> None:
    """One after the other, each with the frame that shows it."""
    page.evaluate(
        f"""async (count) => {{
          for (let k = 0; k < count; k++) {{
            {again};
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          }}
        }}""",
        count,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = Path(folder) / "runs/large/20260101-000000-00000000"
        count = sum(map(len, make_run(run, SHAPE)))
        report([str(run)])
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto((run / "report/timeline.html").as_uri())
        page.wait_for_selector("body[data-ready]")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        print(f"{SHAPE.ranks} ranks, {count // SHAPE.iterations:,} events an iteration; load {os.getloadavg()[0]:.1f}")
        print(f"{'':18}{'main CPU ms':>14}{'all CPU ms':>14}{'rows':>8}{'events':>10}{'bars':>8}")
        for name, (change, again) in VIEWS.items():
            page.evaluate(f"(() => {{ {change} }})()")
            redraws(page, 2, again)
            before, all_before = main_thread_s(session), browser_cpu_s()
            redraws(page, REDRAWS, again)
            spent, all_spent = main_thread_s(session) - before, browser_cpu_s() - all_before
            drawn = "[chart.shown.visible.length, chart.shown.found, chart.shown.bars.length]"
            rows, found, bars = page.evaluate(drawn)
            times = f"{1e3 * spent / REDRAWS:14.1f}{1e3 * all_spent / REDRAWS:14.1f}"
            print(f"{name:18}{times}{rows:8}{found:10,}{bars:8,}")
        browser.close()


if __name__ == "__main__":
    main()
