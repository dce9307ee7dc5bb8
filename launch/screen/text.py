"""Counts, names and lengths of time in the words of a message."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime

from conf.visible import plural, span

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


def ago(seconds: float) -> str:
    """Of an instant that may be after now by a clock that differs."""
    return f"{span(round(max(0.0, seconds)))} ago"


def clock(unix: float, now: float) -> str:
    """A time of day, here; with the day, where that is not the day of `now`."""
    at, today = datetime.fromtimestamp(unix), datetime.fromtimestamp(now).date()
    if at.date() == today:
        return f"{at:%H:%M}"
    return f"{at:%a %H:%M}" if abs((at.date() - today).days) < 7 else f"{at:%Y-%m-%d %H:%M}"


def size_text(size: float) -> str:
    """Bytes, in the unit that fits."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:g} bytes"
        size /= 1024
    return f"{size:.1f} GiB"


def can_be_asked() -> bool:
    """Whether somebody is there to read a question and to answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Whether the answer is yes; anything else is no."""
    print(f"{question} [y/N] ", file=sys.stderr, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
