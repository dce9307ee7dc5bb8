"""Asking the person at the terminal before something is done that cannot be undone."""

from __future__ import annotations

import sys


def can_be_asked() -> bool:
    """Whether somebody is there to read a question and to answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Whether the answer is yes; anything else is no."""
    print(f"{question} [y/N] ", file=sys.stderr, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
