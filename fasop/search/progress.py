"""A bar on a terminal while a search goes on; elsewhere nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Told = Callable[[float], None]
"""Takes the part that is done, 0 to 1."""


def nobody(done: float) -> None:
    """Nothing is shown."""


@contextmanager
def bar(title: str) -> Iterator[Told]:
    """On stderr; it is gone when the search is over."""
    if not sys.stderr.isatty():
        yield nobody
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=1.0)
        yield lambda done: shown.update(task, completed=done)
