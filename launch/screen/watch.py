"""Looking at something again and again: drawn anew on a terminal; elsewhere printed when it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

LOCAL_S = 2.0
SLURM_S = 10.0
"""Between two looks; squeue is answered by one daemon for the whole cluster."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What one look found."""

    plain: str
    key: object
    """Differs from the one before when something has changed, more than the time."""
    over: bool
    """Whether nothing more will change."""
    exit_code: int
    on_slurm: bool = False
    """Whether Slurm had to be asked."""
    screen: RenderableType | None = None
    """For a terminal; None for `plain`."""

    def show(self) -> None:
        if self.screen is None:
            print(visible(self.plain), flush=True)
            return
        from rich.console import Console

        Console(highlight=False).print(self.screen)


def watch(look: Callable[[], View], seconds: float) -> int:
    """Shows what `look` finds every so many seconds, 0 for what suits it, until that is over; returns its exit code.

    Ctrl-C is the caller's to catch.
    """
    view = look()
    if view.screen is not None:
        view = _on_screen(look, view, seconds)
        view.show()
        return view.exit_code
    view.show()
    while not view.over:
        time.sleep(seconds or (SLURM_S if view.on_slurm else LOCAL_S))
        before, view = view, look()
        if view.key != before.key:
            view.show()
    return view.exit_code


def _on_screen(look: Callable[[], View], view: View, seconds: float) -> View:
    """Draws on the terminal's other screen, so that what was on it is there again afterwards; returns the last view."""
    from rich.console import Console
    from rich.live import Live

    with Live(view.screen, console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while not view.over:
            time.sleep(seconds or (SLURM_S if view.on_slurm else LOCAL_S))
            view = look()
            live.update(view.screen or view.plain, refresh=True)
    return view
