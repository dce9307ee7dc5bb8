"""How far a search has come, as a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fasop.search.search import ShowProgress, no_progress


@contextmanager
def bar(title: str, phases: int = 1) -> Iterator[ShowProgress]:
    """On stderr; it is gone when the search is over. It never goes back: each phase has an equal part of it, and the
    next one begins where less is done than before."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=1.0)
        phase, before, farthest = 0, 0.0, 0.0

        def show(done: float) -> None:
            nonlocal phase, before, farthest
            if done < before:
                phase = min(phase + 1, phases - 1)
            before, farthest = done, max(farthest, (phase + min(done, 1.0)) / phases)
            shown.update(task, completed=farthest)

        yield show
