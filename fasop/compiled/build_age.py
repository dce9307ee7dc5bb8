"""Whether compiled modules are older than their sources, as after an update of a checkout that was not installed."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

COPIED = 60
"""Seconds: files of one copy of a checkout have times that differ by less."""


def require_current() -> None:
    """Raises ImportError where they are."""
    if outdated():
        raise ImportError("tdpp's sources have changed since it was installed")


def outdated(folder: Path = Path(__file__).parent) -> bool:
    """Whether a source in this folder was changed after a module there was built; an installed wheel has no sources."""
    changed, built = [], []
    for file in os.scandir(folder):
        if file.name.endswith((".pyx", ".pxd")):
            changed.append(file.stat().st_mtime)
        elif file.name.endswith(EXTENSION_SUFFIXES[0]):
            built.append(file.stat().st_mtime)
    return bool(changed and built) and max(changed) > min(built) + COPIED
