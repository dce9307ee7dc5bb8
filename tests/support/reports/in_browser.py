"""The timeline page in a browser: what a test asks it and does to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from playwright.sync_api import Page

from reports.readers.events import Timeline, read_run
from tests.support import PATIENCE_S
from tests.support.reports.records import records


def events_of(run: Path, ranks: int) -> Timeline:
    return read_run({rank: run / f"events/rank-{rank:05d}.bin" for rank in range(ranks)})


def ready(page: Page) -> Page:
    page.wait_for_selector("body[data-ready]")
    return page


def drawn_after(page: Page, action: Callable[[], object]) -> None:
    """Does something and waits until the timeline has drawn its effect."""
    before = page.evaluate("chart.drawn")
    action()
    until(page, f"chart.drawn > {before} && !chart.pending")


def drawn(page: Page) -> int:
    """How many events the timeline shows, those of a bar for several counted one by one."""
    return int(page.evaluate("chart.shown.bars.reduce((sum, bar) => sum + bar.count, 0)"))


def labels(page: Page) -> list[str]:
    """Of the rows, from top to bottom."""
    found: list[str] = page.evaluate("chart.rows.map((row) => row.fold ?? row.label)")
    return found


def until(page: Page, condition: str) -> None:
    """Waits for a condition in the page; its content policy keeps Playwright from doing so by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def place_of(page: Page, name: str) -> dict[str, float]:
    """The longest bar of a task: the index of its event, its row, times in ns, and its middle in the window."""
    found: dict[str, float] = page.evaluate(
        """(name) => {
          const bars = chart.shown.bars.filter((bar) => run.names[events.name[bar.i]] === name && bar.count === 1);
          const {i, row, start, end, wait, area} = bars.reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a));
          const seen = chart.canvas.getBoundingClientRect();
          return {i, row, start, end, wait, x: seen.left + area[0] + area[2] / 2, y: seen.top + area[1] + area[3] / 2};
        }""",
        name,
    )
    return found


def events_in(timeline: Timeline, iteration: int, ranks: Sequence[int] | None = None) -> int:
    """How many events an iteration has; without `ranks` those of all."""
    events = records(timeline)
    return int(
        ((events["iteration"] == iteration) & np.isin(events["rank"], timeline.ranks if ranks is None else ranks)).sum()
    )


def iteration(page: Page) -> int:
    return int(page.input_value("#iteration"))


def colour_at(page: Page, x: float, y: float) -> list[int]:
    """Red, green, blue and opacity of the timeline at a point of its canvas."""
    colour: list[int] = page.evaluate(
        """([x, y]) => {
          const copy = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
          copy.drawImage(chart.canvas, Math.round(x), Math.round(y), 1, 1, 0, 0, 1, 1);
          return Array.from(copy.getImageData(0, 0, 1, 1).data);
        }""",
        [x, y],
    )
    return colour
