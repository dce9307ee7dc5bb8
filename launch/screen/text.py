"""Counts, names and lengths of time in the words of a message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from conf.visible import plural


def some(names: Sequence[str], most: int) -> str:
    """`a, b and 3 others`: at most so many by their names."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {plural(others, 'other')}" if others > 0 else "")


def first_line(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return f"{first}{' …' if more else ''}"


def ago(seconds: float) -> str:
    """Of an instant that may be after now by a clock that differs."""
    return f"{span(max(0.0, seconds))} ago"


def span(seconds: float) -> str:
    """In the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


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
