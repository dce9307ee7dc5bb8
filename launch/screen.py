"""What people read on a terminal: counts, names and times in words, tables, views drawn anew, and questions."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from conf.visible import plural, span, visible

if TYPE_CHECKING:
    from rich.console import RenderableType


_STACK = re.compile(r"Exception raised from |frame #\d|Traceback \(|Stack trace|C\+\+ CapturedTraceback|File \"")
"""How the lines of a stack begin: libtorch's, Python's."""
_POINTS = (".", ":", ";", ",", "!", "?")


def some(names: Sequence[str], most: int) -> str:
    """`a, b and 3 others`: at most so many by their names."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {plural(others, 'other')}" if others > 0 else "")


def first_line(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return f"{first}{' …' if more else ''}"


def one_line(text: str) -> str:
    """All lines in one, up to a stack, whose frames help no user: the remedy often stands behind the first line."""
    lines: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if lines and _STACK.match(line):
            return f"{_joined(lines)} …"
        lines.append(line)
    return _joined(lines)


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}{' ' if line.endswith(_POINTS) else '; '}" for line in lines[:-1]) + "".join(lines[-1:])


def remark(*texts: object | None) -> None:
    """Prints what a command has to say besides its result, in parentheses on stderr; nothing for None."""
    for text in texts:
        if text is not None:
            print(f"({text})", file=sys.stderr, flush=True)


def ago(seconds: float) -> str:
    """Writes how long ago an instant was; it may be after now by a clock that differs."""
    return f"{span(round(max(0.0, seconds)))} ago"


def clock(unix: float, now: float) -> str:
    """A time of day, here; with the day, where that is not the day of `now`."""
    at, today = datetime.fromtimestamp(unix), datetime.fromtimestamp(now).date()
    if at.date() == today:
        return f"{at:%H:%M}"
    return f"{at:%a %H:%M}" if abs((at.date() - today).days) < 7 else f"{at:%Y-%m-%d %H:%M}"


def can_be_asked() -> bool:
    """Whether somebody is there to read a question and to answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Whether the answer is yes; anything else is no."""
    print(f"{question} [y/N] ", file=sys.stderr, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


_BLANKS = 2
"""Between two columns."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows may be shorter than the heading. No cell is ever cut: partitions and paths are there to be copied."""
    if not sys.stdout.isatty():
        print(plain(columns, rows))
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))  # a plain string could hold rich's markup
    console = Console()
    if Measurement.get(console, console.options.update(max_width=sys.maxsize), table).maximum <= console.width:
        console.print(table)
    else:
        print(narrow(columns, rows, console.width))


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart; the last one is not padded. Rows may be shorter than the heading."""
    whole = _whole(columns, rows)
    widths = _widths(whole)
    lines = ((" " * _BLANKS).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in whole)
    return "\n".join(line.rstrip() for line in lines)


def narrow(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """The same in `width` characters: what takes most of them stands beneath each row, by the column's name."""
    whole = _whole(columns, rows)
    widths = _widths(whole)
    beside = list(range(len(columns)))
    while sum(widths[column] + _BLANKS for column in beside) - _BLANKS > width and len(beside) > 1:
        beside.remove(max(beside, key=lambda column: widths[column]))
    beneath = [column for column in range(len(columns)) if column not in beside]
    heading, *lines = plain([columns[c] for c in beside], [[row[c] for c in beside] for row in whole[1:]]).split("\n")
    shown = [heading]
    for line, row in zip(lines, whole[1:], strict=True):
        shown += [line, *(f"    {columns[column]}: {row[column]}" for column in beneath if row[column])]
    return "\n".join(shown)


def _whole(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Heading and rows, all as long as the heading."""
    return [(*map(visible, row), *[""] * (len(columns) - len(row))) for row in (columns, *rows)]


def _widths(whole: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*whole, strict=True)]


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
