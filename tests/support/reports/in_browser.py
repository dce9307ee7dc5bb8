"""The timeline page in a browser: what a test asks it and does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from playwright.sync_api import Page

from reports.readers.events import Timeline, read_run
from tests.support.reports.records import records

BARS = "#timeline .barlayer .trace:not(:last-child) .point"
"""Of events; the last trace covers what is waiting of them."""
WAITS = "#timeline .barlayer .trace:last-child .point"


def events_of(run: Path, ranks: int) -> Timeline:
    return read_run({rank: run / f"events/rank-{rank:05d}.bin" for rank in range(ranks)})


def ready(page: Page) -> Page:
    page.wait_for_selector("body[data-ready]")
    return page


def drawn_after(page: Page, action: Callable[[], object]) -> None:
    """Does something and waits until Plotly has drawn its effect."""
    page.evaluate(
        """void (drawn = new Promise((done, fail) => {
            element("timeline").once("plotly_afterplot", done);
            setTimeout(() => fail(new Error("nothing was drawn")), 10_000);
        }))"""
    )
    action()
    page.evaluate("drawn")


def events_in(timeline: Timeline, iteration: int, ranks: Sequence[int] | None = None) -> int:
    """How many events an iteration has; without `ranks` those of all."""
    events = records(timeline)
    return int(
        ((events["iteration"] == iteration) & np.isin(events["rank"], timeline.ranks if ranks is None else ranks)).sum()
    )


def iteration(page: Page) -> int:
    return int(page.input_value("#iteration"))
